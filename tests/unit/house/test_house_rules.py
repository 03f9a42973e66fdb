"""The repository obeys the house rules, and each guard finds a small case that breaks its rule."""

import functools
from pathlib import Path, PurePosixPath

import pytest

from tools import repo_checks

ROOT = Path(__file__).parents[3]
# Vendored or legal text, and locks: not ours to reword.
NOT_PROSE = {"LICENSE"}


@functools.cache
def repository() -> dict[PurePosixPath, str]:
    return repo_checks.tracked_texts(ROOT)


def prose_and_code() -> dict[PurePosixPath, str]:
    return {path: text for path, text in repository().items() if str(path) not in NOT_PROSE}


def paths(*names: str) -> list[PurePosixPath]:
    return [PurePosixPath(name) for name in names]


def test_git_knows_the_files_that_the_guards_read() -> None:
    assert PurePosixPath("pyproject.toml") in repository()
    assert len(repository()) > 20


def test_no_package_shadows_the_standard_library() -> None:
    assert repo_checks.shadowing_packages(repository()) == []


@pytest.mark.parametrize("name", ["operator/__init__.py", "tests/operator/__init__.py"])
def test_a_package_named_as_a_standard_module_is_found(name: str) -> None:
    inside = paths("operator/polyreme_operator/__init__.py", "operator/polyreme_operator/types/__init__.py")
    assert repo_checks.shadowing_packages([*paths(name), *inside]) == paths(name)


def test_no_root_and_no_test_folder_is_a_package() -> None:
    assert repo_checks.packages_where_none_may_be(repository()) == []


@pytest.mark.parametrize("name", ["cli/__init__.py", "tests/unit/api/__init__.py", "__init__.py", "tools/__init__.py"])
def test_a_package_where_none_may_be_is_found(name: str) -> None:
    assert repo_checks.packages_where_none_may_be(paths(name, "cli/polyreme/__init__.py")) == paths(name)


def test_test_files_have_names_of_their_own() -> None:
    assert repo_checks.repeated_test_names(repository()) == []


def test_a_repeated_test_name_is_found() -> None:
    seen = paths(
        "tests/unit/a/test_x.py", "tests/simulator/test_x.py", "tests/simulator/conftest.py", "tests/unit/conftest.py"
    )
    assert repo_checks.repeated_test_names(seen) == ["test_x.py"]


def test_files_fit_a_room_and_the_readme_a_sitting() -> None:
    assert repo_checks.long_files(repository()) == []


@pytest.mark.parametrize(("name", "limit"), [("a.py", 500), ("README.md", 150)])
def test_a_long_file_is_found(name: str, limit: int) -> None:
    at_most, more = "x\n" * limit, "x\n" * (limit + 1)
    assert repo_checks.long_files({PurePosixPath(name): at_most}) == []
    assert repo_checks.long_files({PurePosixPath(name): more}) == [f"{name}: {limit + 1} lines, at most {limit}"]


def test_functions_fit_a_screen() -> None:
    assert repo_checks.long_functions(repository()) == []


def test_a_long_function_is_found() -> None:
    body = "def f():\n" + "    x = 1\n" * 70
    assert repo_checks.long_functions({PurePosixPath("a.py"): body}) == ["a.py:1: f has 71 lines, at most 70"]


def test_no_file_names_a_path_of_one_machine() -> None:
    assert repo_checks.matches(prose_and_code(), repo_checks.MACHINE_PATH) == []


@pytest.mark.parametrize(
    "line", ["cd /" + "work/main", 'path = "/' + 'root/x"', "see /" + "home/someone/a", "/" + "opt/wheels"]
)
def test_a_path_of_one_machine_is_found(line: str) -> None:
    assert repo_checks.matches({PurePosixPath("a.md"): line}, repo_checks.MACHINE_PATH) != []


@pytest.mark.parametrize(
    "line", ["https://host/work/x", "$HOME/work/x", "../root/x", "teamwork/rooted", "{base}/work/y"]
)
def test_a_path_of_no_machine_is_left_alone(line: str) -> None:
    assert repo_checks.matches({PurePosixPath("a.md"): line}, repo_checks.MACHINE_PATH) == []


def test_no_file_names_a_package_registry() -> None:
    assert repo_checks.matches(prose_and_code(), repo_checks.ADDRESS) == []


def test_no_file_holds_credentials_in_an_address() -> None:
    # Tests make up credentials, to see that they are hidden.
    shipped = {path: text for path, text in prose_and_code().items() if path.parts[0] != "tests"}
    assert repo_checks.matches(shipped, repo_checks.CREDENTIALS) == []


def test_an_address_of_a_registry_is_found() -> None:
    line = "--index-url https://pypi" + ".org/simple"
    assert repo_checks.matches({PurePosixPath("a.lock"): line}, repo_checks.ADDRESS) != []


def test_credentials_in_an_address_are_found() -> None:
    line = "https://user:secret" + "@host/x"
    assert repo_checks.matches({PurePosixPath("a.yaml"): line}, repo_checks.CREDENTIALS) != []


def test_nothing_is_left_for_later() -> None:
    assert repo_checks.matches(prose_and_code(), repo_checks.UNFINISHED) == []


@pytest.mark.parametrize("word", ["TO" + "DO", "FIX" + "ME", "X" + "XX"])
def test_a_note_for_later_is_found(word: str) -> None:
    assert repo_checks.matches({PurePosixPath("a.yaml"): f"# {word}: more"}, repo_checks.UNFINISHED) == [
        f"a.yaml:1: {word}"
    ]


def test_decision_records_are_numbered_without_gaps() -> None:
    names = [path.name for path in repository() if path.parts[:2] == ("docs", "adr")]
    assert names
    assert repo_checks.misnumbered_records(names) == []


@pytest.mark.parametrize("names", [["0002-b.md"], ["0001-a.md", "0001-b.md"], ["0001-a.md", "0003-c.md"], ["notes.md"]])
def test_a_misnumbered_record_is_found(names: list[str]) -> None:
    assert repo_checks.misnumbered_records(names) != []


def test_every_exit_code_has_its_name() -> None:
    assert repo_checks.bare_exit_codes(repository()) == []


@pytest.mark.parametrize(
    "line",
    [
        "sys.exit(3)",
        "os._exit(1)",
        "raise SystemExit(7)",
        "raise typer.Exit(code=2)",
        "CODE_FENCED = 17",
        "EXIT_STOPPED: int = 75",
        "failed = one.code != 0",
        "failed = code not in {0, 75}",
        "finish(exit_code=1)",
        "def kill(code: int = 137): pass",
        "def main():\n    return 1",
    ],
)
def test_an_exit_code_without_a_name_is_found(line: str) -> None:
    path = PurePosixPath("cli/polyreme/a.py")
    assert len(repo_checks.bare_exit_codes({path: line})) == line.count("0, 75") + 1
    assert repo_checks.bare_exit_codes({PurePosixPath("tools/a.py"): line}) == []


@pytest.mark.parametrize(
    "line", ["sys.exit(main())", "if code == 404: pass", "CODE_BITS_MAX = 62", "code = -1 if a else b", "EXIT_S = 25.0"]
)
def test_another_number_is_no_exit_code(line: str) -> None:
    assert repo_checks.bare_exit_codes({PurePosixPath("cli/polyreme/a.py"): line}) == []
