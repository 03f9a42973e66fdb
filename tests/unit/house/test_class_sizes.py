"""No class has more than one concern, as far as its size shows that, and each guard finds a class that is too large."""

from pathlib import Path, PurePosixPath

import pytest

from tools import repo_checks

ROOT = Path(__file__).parents[3]


def test_classes_have_one_concern() -> None:
    found = repo_checks.large_classes(repo_checks.tracked_texts(ROOT))
    assert found == {}


@pytest.mark.parametrize(
    ("measure", "size", "text"),
    [
        ("lines", 251, "class A:\n" + "    x = 1\n" * 250),
        ("attributes", 16, "class A:\n    def f(self):\n" + "".join(f"        self.x{n} = {n}\n" for n in range(16))),
        (
            "constructor parameters",
            8,
            "class A:\n    def __init__(self, a, b, c, d, *, e, f, g, h):\n        pass\n",
        ),
    ],
)
def test_a_large_class_is_found(measure: str, size: int, text: str) -> None:
    assert repo_checks.large_classes({PurePosixPath("api/a.py"): text}) == {f"A: {measure}": size}


def test_a_class_at_the_limits_is_left_alone() -> None:
    text = "class A:\n    def __init__(self, a, b, c, d, *, e, f, g):\n" + "".join(
        f"        self.x{number} = a\n" for number in range(15)
    )
    assert repo_checks.large_classes({PurePosixPath("api/a.py"): text + "    y = 1\n" * 233}) == {}
