"""Commands whose modules are imported when they are called; help and completion list them without."""

from __future__ import annotations

import ast
import dataclasses
import functools
import importlib
import importlib.abc
import importlib.util
from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any, Protocol

import typer
from typer.core import TyperCommand, TyperGroup
from typer.main import get_command


class Declared(Protocol):
    """A command or a group of commands, as a command line declares it."""

    @property
    def name(self) -> str:
        """What a person types."""
        ...

    def listed(self) -> TyperCommand | TyperGroup:
        """Return it as help lists it."""
        ...

    def loaded(self) -> TyperCommand | TyperGroup:
        """Return it with its options, to be called."""
        ...


@dataclasses.dataclass(frozen=True, slots=True)
class Command:
    """A command: a function of a module, of the same name."""

    module: str
    name: str

    @property
    def function(self) -> str:
        """Name of the function."""
        return self.name.replace("-", "_")

    def listed(self) -> TyperCommand:
        """Return it as help lists it, by the docstring in the module's source."""
        return TyperCommand(self.name, help=_docstrings(self.module)[self.function])

    def loaded(self) -> TyperCommand:
        """Import the module, and return the command with its options."""
        app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
        app.command(name=self.name)(getattr(importlib.import_module(self.module), self.function))
        command = get_command(app)
        assert isinstance(command, TyperCommand)
        return command


def commands(module: str, *names: str) -> list[Command]:
    """Declare the commands of one module."""
    return [Command(module, name) for name in names]


@dataclasses.dataclass(frozen=True, slots=True)
class Group:
    """Commands under one word."""

    name: str
    help: str
    commands: Sequence[Declared]

    def listed(self) -> TyperGroup:
        """Return it as help lists it."""
        return group_of(self.commands)(name=self.name, help=self.help, no_args_is_help=True)

    def loaded(self) -> TyperGroup:
        """Return it, to be called."""
        return self.listed()


def group_of(declared: Sequence[Declared]) -> type[TyperGroup]:
    """Return the class of a group with these commands."""

    class LazyGroup(TyperGroup):
        def __init__(self, **attributes: Any) -> None:
            super().__init__(**attributes)
            self.commands = _Loaded(declared)

        def list_commands(self, ctx: Any) -> list[str]:
            del ctx
            return [each.name for each in declared]

        def get_command(self, ctx: Any, cmd_name: str) -> Any:
            del ctx
            return next((each.listed() for each in declared if each.name == cmd_name), None)

        def resolve_command(self, ctx: Any, args: list[str]) -> Any:
            name, _, rest = super().resolve_command(ctx, args)
            return name, None if name is None else self.commands[name], rest

    return LazyGroup


class _Loaded(MutableMapping[str, Any]):
    """The commands of a group by name: each is imported when it is looked up."""

    def __init__(self, declared: Sequence[Declared]) -> None:
        self._declared = {each.name: each for each in declared}

    def __getitem__(self, name: str) -> Any:
        return self._declared[name].loaded()

    def __iter__(self) -> Iterator[str]:
        return iter(self._declared)

    def __len__(self) -> int:
        return len(self._declared)

    def __setitem__(self, name: str, command: Any) -> None:
        raise TypeError(f"a command is declared, not added: {name}")

    def __delitem__(self, name: str) -> None:
        raise TypeError(f"a command can't be taken away: {name}")


@functools.cache
def _docstrings(module: str) -> dict[str, str]:
    """Return the docstrings of a module's functions, without importing it."""
    spec = importlib.util.find_spec(module)
    assert spec is not None
    assert isinstance(spec.loader, importlib.abc.InspectLoader)
    functions = (
        each for each in ast.parse(spec.loader.get_source(module) or "").body if isinstance(each, ast.FunctionDef)
    )
    return {each.name: ast.get_docstring(each) or "" for each in functions}
