"""A mutant's verdict comes from tests alone: what goes wrong while it is planted kills none."""

import importlib.util
import warnings
from pathlib import Path
from types import ModuleType

import pytest

from tools.mutation.mutants import Mutant
from tools.mutation.runner import exchange, verdict_of

SOURCE = "def f(a, b):\n    return a < b\n"
MUTANT = Mutant(file="planted.py", function="f", operator="Lt to LtE", expression="a < b")


class Deprecated:
    """As torch has some: access to the class warns."""

    def __init__(self) -> None:
        self.itself = [self]
        """Among what the garbage collector tracks."""

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        warnings.warn("deprecated", FutureWarning, stacklevel=2)
        return Deprecated


@pytest.fixture
def loaded(tmp_path: Path) -> ModuleType:
    path = tmp_path / "planted.py"
    path.write_text(SOURCE)
    spec = importlib.util.spec_from_file_location("planted", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_function_is_exchanged_beside_objects_that_warn_when_they_are_looked_at(loaded: ModuleType) -> None:
    kept = Deprecated()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert exchange(Path(str(loaded.__file__)), SOURCE, MUTANT)
    assert kept.itself
    assert loaded.f(2, 2)


def test_an_error_kills_a_mutant_only_once_it_is_planted() -> None:
    def broken() -> bool:
        raise FutureWarning("deprecated")

    def failing() -> str:
        raise FutureWarning("deprecated")

    assert verdict_of(broken, lambda: "a test").startswith("unplanted FutureWarning")
    assert verdict_of(lambda: False, lambda: "a test") == "unplanted "
    assert verdict_of(lambda: True, failing) == "killed FutureWarning"
    assert verdict_of(lambda: True, lambda: "a test") == "killed a test"
    assert verdict_of(lambda: True, lambda: None) == "survived "
