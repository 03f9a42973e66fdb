"""Commands on a machine with data and no run: tables and JSON, unknown names, help with examples."""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from polyreme.main import invoke
from polyreme.views.output import nearest
from polyreme.views.spinner import busy
from polyreme_api.exit_codes import ExitCode

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Call:
    """Call a command on a home of the test's own; returns exit code, data, and messages."""

    def on_home(*arguments: str) -> tuple[int, str, str]:
        capsys.readouterr()
        code = invoke(["--home", str(tmp_path / "home"), *arguments])
        shown = capsys.readouterr()
        return code, shown.out, shown.err

    return on_home


def write_dataset(folder: Path) -> Path:
    """Two records of text."""
    turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "!"}]
    path = folder / "talk.jsonl"
    path.write_text("".join(json.dumps({"id": name, "conversations": turns}) + "\n" for name in ("first", "second")))
    return path


def item(output: str) -> Any:
    """The data of the JSON envelope."""
    value = json.loads(output)
    assert value["version"] == "polyreme.dev/cli/v1"
    return value["item"] if "item" in value else value["items"]


def test_a_word_too_few_is_answered_with_the_help_of_its_own_command(call: Call) -> None:
    code, _, said = call("data", "ingest", "pages", "--recipe", "captioned-pages")
    assert code == ExitCode.USAGE
    assert said == "polyreme: Missing option '--name'; see polyreme data ingest --help\n"


def test_a_refused_value_is_named_with_its_option(call: Call) -> None:
    code, _, said = call("console", "--port", "99999")
    assert code == ExitCode.USAGE
    assert said.startswith("polyreme: Invalid value for '--port': ")


@pytest.mark.parametrize("command", [["doctor"], ["version"], ["data", "ls"], ["runs", "ls"]], ids=" ".join)
def test_a_table_and_json_say_the_same(command: list[str], call: Call) -> None:
    code, table, _ = call(*command)
    assert code == ExitCode.OK
    code, output, _ = call(*command, "-o", "json")
    assert code == ExitCode.OK
    value = item(output)
    lines = table.splitlines()
    if isinstance(value, list):
        assert len(lines) == len(value) + 1
        assert all(str(row.get("name", row.get("check"))) in table for row in value)
    else:
        assert [line.split()[0] for line in lines] == list(value)


def test_a_dataset_is_registered_once_listed_and_shown(call: Call, tmp_path: Path) -> None:
    path = write_dataset(tmp_path)
    for _ in range(2):
        code, output, said = call("data", "register", "talk", str(path), "-o", "json")
        assert code == ExitCode.OK
        assert "found 2 records" in said
        assert (item(output)["reference"], item(output)["records"]) == ("talk@1", 2)
    rows = {row["name"]: row for row in item(call("data", "ls", "-o", "json")[1])}
    assert (rows["talk"]["versions"], rows["talk"]["records"]) == (1, 2)
    shown = item(call("data", "show", "talk", "-o", "json")[1])
    assert shown["version"]["source"]["path"] == str(path)
    assert shown["deadLetters"] == []
    table = call("data", "show", "talk@1")[1]
    assert "talk@1" in table
    assert str(path) in table
    assert "STAGE" in table
    assert "{" not in table
    assert "(" not in table


@pytest.mark.parametrize(
    ("arguments", "near"),
    [
        (["data", "show", "sample/digit-1"], "did you mean 'sample/digits-1'"),
        (["data", "show", "sample/digits-1@9"], "sample/digits-1@9"),
        (["data", "register", "talk", "/no/such.jsonl"], "no such file or folder: /no/such.jsonl"),
        (["runs", "show", "nobody"], "there are none"),
        (["runs", "logs", "nobody"], "there are none"),
        (["runs", "stop", "nobody"], "there are none"),
        (["checkpoint", "ls", "nobody"], "there are none"),
        (["checkpoint", "export", "nobody", "--to", "/nowhere"], "there are none"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_unknown_name_is_not_found(arguments: list[str], near: str, call: Call) -> None:
    code, output, said = call(*arguments)
    assert code == ExitCode.NOT_FOUND
    assert output == ""
    assert near in said
    assert said.count("\n") == 1


@pytest.mark.parametrize(
    "arguments",
    [["data", "register", "Upper Case", "."], ["runs", "lss"], ["-x"]],
    ids=" ".join,
)
def test_a_wrong_call_is_a_usage_error_in_one_line(arguments: list[str], call: Call) -> None:
    code, output, said = call(*arguments)
    assert code == ExitCode.USAGE
    assert output == ""
    assert said.count("\n") == 1


def test_a_home_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert invoke(["--home", str(tmp_path / "file"), "data", "ls"]) == ExitCode.USAGE


def test_a_home_that_can_not_be_made_is_the_machines_fault(capsys: pytest.CaptureFixture[str]) -> None:
    capsys.readouterr()
    assert invoke(["--home", "/proc/polyreme", "data", "ls"]) == ExitCode.ENVIRONMENT
    said = capsys.readouterr().err
    assert "/proc/polyreme" in said
    assert said.count("\n") == 1


def test_nearest_names_are_offered_or_all_of_them() -> None:
    assert nearest("quikstart", ["quickstart", "other"]) == "did you mean 'quickstart'?"
    assert nearest("x", ["quickstart", "other"]) == "there are quickstart, other"
    assert nearest("x", []) == "there are none"


@pytest.mark.parametrize("terminal", [True, False])
def test_a_sign_of_life_is_for_terminals_only(terminal: bool) -> None:
    shown = io.StringIO()
    with busy("reading [pages]", Console(file=shown, force_terminal=terminal, width=80)):
        assert terminal or shown.getvalue() == ""
    assert ("reading [pages]" in shown.getvalue()) is terminal
