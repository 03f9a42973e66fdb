"""Pages, messages, comments and names are in plain English: the check passes, and finds planted words."""

from pathlib import Path, PurePosixPath

import pytest

from tools import avoided_words

ROOT = Path(__file__).parents[3]
SOURCE = PurePosixPath("cli/polyreme/example.py")


def lines(path: str, content: str, exceptions: dict[tuple[str, str], str] | None = None) -> list[int]:
    """Line numbers of what the check finds in one file."""
    found = avoided_words.findings({PurePosixPath(path): content}, exceptions or {})
    return [line for _, line, _ in found]


def test_no_text_and_no_name_has_an_avoided_word() -> None:
    assert avoided_words.findings(avoided_words.checked_files(ROOT)) == []


def test_pages_manifests_and_sources_are_read_and_generated_files_are_not() -> None:
    paths = {str(path) for path in avoided_words.checked_files(ROOT)}
    assert {"README.md", "manifests/operator.yaml", "cli/polyreme/main.py", "tools/links.py"} <= paths
    assert not {path for path in paths if path.startswith(("manifests/crd", "docs/adr/"))}


@pytest.mark.parametrize(
    "sentence",
    [
        "the run begins anew",
        "Nobody reads it",
        "mend that and try again",
        "the speed hangs on the layout",
        "a hang is told",
        "the same command goes on",
        "a job makes way for another",
        "it is made again",
        "the parts stand still",
        "of which two are free",
    ],
)
def test_an_avoided_word_is_found_with_its_line(sentence: str) -> None:
    assert lines("docs/page.md", f"# Title\n\n{sentence}\n") == [3]


@pytest.mark.parametrize("sentence", ["the build goes on a free node", "no Go on PATH", "understands it", "whoa"])
def test_other_words_are_left_alone(sentence: str) -> None:
    assert lines("docs/page.md", sentence) == []


def test_names_in_code_spans_and_links_are_left_alone() -> None:
    assert lines("docs/page.md", "`told.py` and [a record](adr/0018-made-anew.md)") == []


@pytest.mark.parametrize(
    "source",
    [
        'raise ValueError("mend the queue")',
        'raise ValueError(f"{name} goes on")',
        'note("nobody has it")',
        'x: Annotated[int, Option(help="It goes on.")] = 0',
    ],
)
def test_messages_in_sources_are_checked(source: str) -> None:
    assert lines(str(SOURCE), source) == [1]


@pytest.mark.parametrize(
    ("source", "line"),
    [
        ('"""Nobody reads this."""', 1),
        ('def run() -> None:\n    """Run it.\n\n    The run goes on.\n    """\n', 4),
        ("x = 1\ny = 2  # begins anew", 2),
        ("# Each rank sends parts of the image that it\n# stands for, of\n# which two are free.\n", 2),
    ],
)
def test_docstrings_and_comments_are_checked(source: str, line: int) -> None:
    assert lines(str(SOURCE), source) == [line]


@pytest.mark.parametrize("source", ["anew = 1", 'KEY = "anew"', "# `told` stands for it", "#: ``anew``"])
def test_identifiers_and_code_in_comments_are_left_alone(source: str) -> None:
    assert lines(str(SOURCE), source) == []


@pytest.mark.parametrize(
    "source",
    [
        "class Standing: ...",
        "class PastTheEnd:\n    told: str",
        "def _until_told() -> None: ...",
        "async def find(self, *, besides: str) -> None: ...",
    ],
)
def test_names_with_avoided_words_are_found(source: str) -> None:
    assert lines(str(SOURCE), source) == [source.count("\n") + 1]


def test_a_docstring_of_a_module_begins_with_no_question() -> None:
    assert lines(str(SOURCE), '"""What a run has."""') == [1]
    assert lines(str(SOURCE), '"""Whatever a run has."""') == []
    assert lines("tests/unit/test_example.py", '"""What a run has."""') == []


def test_of_tests_comments_and_docstrings_are_checked() -> None:
    source = '"""Nobody reads it."""\n\n\ndef test_told() -> None:\n    assert "anew"  # stands\n'
    assert lines("tests/unit/test_example.py", source) == [1, 5]


def test_the_name_of_a_module_is_checked() -> None:
    assert lines("operator/polyreme_operator/told.py", "") == [1]
    assert lines("operator/polyreme_operator/outstanding.py", "") == []


@pytest.mark.parametrize(
    "source", ["def threshold() -> None: ...", "class Understanding: ...", "def f(whole: int): ..."]
)
def test_other_names_are_left_alone(source: str) -> None:
    assert lines(str(SOURCE), source) == []


def test_an_exception_covers_its_own_text_in_its_own_file() -> None:
    exceptions = {("docs/page.md", "a proxy behind it"): "a place, not a time"}
    assert lines("docs/page.md", "a proxy behind it", exceptions) == []
    assert lines("docs/page.md", "a proxy behind it, behind time", exceptions) == [1]
    assert lines("docs/other.md", "a proxy behind it", exceptions) == [1]


def test_every_exception_is_still_needed() -> None:
    files = avoided_words.checked_files(ROOT)
    for exception in avoided_words.EXCEPTIONS:
        others = {other: why for other, why in avoided_words.EXCEPTIONS.items() if other != exception}
        assert avoided_words.findings(files, others), exception
