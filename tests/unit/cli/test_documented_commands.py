"""Every command that README, how-tos and help texts show exists, with the options that they give it."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from typing import Any

import pytest
from typer import TyperException
from typer.main import get_command

from polyreme.main import app
from polyreme.plugin.main import app as plugin
from polyreme_operator.options import parse
from tests.documented import PAGES, ROOT, commands, inline, words

ALL = [(page.name, command) for page in PAGES for command in commands(page)]
NAMED = [(page.name, command) for page in PAGES for command in inline(page)]


def examples() -> Iterator[tuple[str, str]]:
    """Examples of the help texts."""
    for root, program in ((get_command(app), "polyreme"), (get_command(plugin), "kubectl polyreme")):
        todo = [root]
        while todo:
            command = todo.pop()
            todo += getattr(command, "commands", {}).values()
            for line in (command.help or "").splitlines():
                found = re.fullmatch(rf"(?:Examples?: )?({program} .*)", line.strip())
                if found is not None and "  " not in found[1]:
                    yield from ((program, part) for part in found[1].split(" && "))


def check(command: str, *, whole: bool) -> None:
    """Fail where a command, an option or, of a whole command, an argument is wrong."""
    first, *rest = words(command.partition(" | ")[0])
    if first == "make":
        (target,) = (word for word in rest if "=" not in word)
        assert re.search(rf"^(\.PHONY: .*)?\b{re.escape(target)}\b.*:", (ROOT / "Makefile").read_text(), re.MULTILINE)
    elif first == "pip":
        extras = set(re.fullmatch(r"\.\[(.*)\]", rest[-1])[1].split(","))  # type: ignore[index]
        assert extras <= set(tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"])
    elif first == "polyreme-operator":
        parse(rest, {})
    else:
        _check_typed(get_command(plugin if first == "kubectl" else app), rest[first == "kubectl" :], whole=whole)


def _check_typed(command: Any, rest: list[str], *, whole: bool) -> None:
    while hasattr(command, "commands") and rest and not rest[0].startswith("-"):
        assert rest[0] in command.commands, f"no command {rest[0]!r}"
        command, rest = command.commands[rest[0]], rest[1:]
    if whole and rest != ["--help"]:
        try:
            command.make_context(command.name, list(rest))
        except TyperException as error:
            raise AssertionError(str(error)) from error
        return
    known = {name for parameter in command.params for name in parameter.opts} | {"--help"}
    assert {word for word in rest if word.startswith("-") and word != "-"} <= known


@pytest.mark.parametrize(("page", "command"), ALL, ids=[f"{page}: {command}" for page, command in ALL])
def test_a_documented_command_exists_with_its_options(page: str, command: str) -> None:
    check(command, whole=True)


@pytest.mark.parametrize(("page", "command"), NAMED, ids=[f"{page}: {command}" for page, command in NAMED])
def test_a_command_that_a_sentence_names_exists(page: str, command: str) -> None:
    check(command, whole=False)


@pytest.mark.parametrize("command", [command for _, command in examples()])
def test_an_example_of_a_help_text_is_right(command: str) -> None:
    check(command, whole=True)


def test_the_pages_and_helps_show_many_commands() -> None:
    assert len(ALL) > 40
    assert len(list(examples())) > 30


@pytest.mark.parametrize(
    "wrong",
    [
        "polyreme runs lss",
        "polyreme validate",
        "polyreme plan job.yaml --hardwear cpu",
        "make nothing",
        "pip install '.[all]'",
    ],
)
def test_a_wrong_command_is_found(wrong: str) -> None:
    with pytest.raises(AssertionError):
        check(wrong, whole=True)
