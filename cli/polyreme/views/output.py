"""Output of commands: data on standard output as a table or JSON, everything else on standard error."""

from __future__ import annotations

import contextlib
import difflib
import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Annotated, Any

import typer

from polyreme_api.errors import InvalidConfigError

OUTPUT_VERSION = "polyreme.dev/cli/v1"
NEAREST_MAX = 3
NAMES_SHOWN_MAX = 10


class Format(StrEnum):
    """Output format."""

    TABLE = "table"
    JSON = "json"


class ManifestFormat(StrEnum):
    """Output format of commands that can also print manifests."""

    TABLE = "table"
    JSON = "json"
    YAML = "yaml"


OutputOption = Annotated[Format, typer.Option("-o", "--output", help="Output format.")]


def emit(kind: str, value: Any, *, output: Format, columns: Sequence[tuple[str, str]] = ()) -> None:
    """Print rows or one object.

    Args:
        kind: Name of the kind of data, in the JSON envelope.
        value: A list of rows or one mapping, JSON-able.
        output: Table or JSON.
        columns: For a table: heading and key of each column; for one mapping: heading and key of each line.
    """
    if output is Format.JSON:
        key = "items" if isinstance(value, list) else "item"
        sys.stdout.write(json.dumps({"version": OUTPUT_VERSION, "kind": kind, key: value}, indent=2) + "\n")
    elif isinstance(value, list):
        _table(value, columns)
    else:
        width = max((len(heading) for heading, _ in columns), default=0)
        for heading, key in columns:
            sys.stdout.write(f"{heading:<{width}}  {text(value.get(key))}\n")


def print_manifests(documents: Sequence[Any]) -> None:
    """Print manifests as YAML, so that ``kubectl create -f -`` reads them."""
    import yaml

    sys.stdout.write(yaml.safe_dump_all(documents, sort_keys=False, allow_unicode=True))


def lines(*names: str) -> list[tuple[str, str]]:
    """Return heading and key of each line or column that is named as ``key`` or ``key:heading``."""
    return [(heading or key, key) for key, _, heading in (name.partition(":") for name in names)]


def columns_of(*names: str) -> list[tuple[str, str]]:
    """Return the same with headings in capitals, for a table of rows."""
    return [(heading.upper(), key) for heading, key in lines(*names)]


def emit_tables(tables: Sequence[tuple[str, Sequence[dict[str, Any]], Sequence[tuple[str, str]]]]) -> None:
    """Print tables one below the other, each under its title; one without rows is left out."""
    for title, rows, columns in tables:
        if rows:
            sys.stdout.write(f"\n{title}\n")
            _table(rows, columns)


def nearest(name: str, known: Iterable[str]) -> str:
    """Say which of the known names was probably meant, or which there are."""
    names = list(known)
    if near := difflib.get_close_matches(name, names, n=NEAREST_MAX):
        return "did you mean " + " or ".join(map(repr, near)) + "?"
    return f"there are {', '.join(names[-NAMES_SHOWN_MAX:])}" if names else "there are none"


def text(value: Any) -> str:
    """Write a cell."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value)


def confirm(question: str, *, yes: bool) -> None:
    """Ask before something is deleted, unless the person has said yes.

    Raises:
        InvalidConfigError: If standard input is no terminal.
        typer.Abort: If the answer is no.
    """
    if yes:
        return
    if not sys.stdin.isatty():
        raise InvalidConfigError(
            "this command deletes data and can't ask, since standard input is not a terminal; add --yes"
        )
    typer.confirm(question, abort=True, err=True)


def note(words: str) -> None:
    """Say something to the person, on standard error; on a full disk only the exit code can say it."""
    with contextlib.suppress(OSError):
        sys.stderr.write(words + "\n")


def _table(rows: Sequence[dict[str, Any]], columns: Sequence[tuple[str, str]]) -> None:
    cells = [[heading for heading, _ in columns], *([text(row.get(key)) for _, key in columns] for row in rows)]
    widths = [max(len(row[at]) for row in cells) for at in range(len(columns))]
    for row in cells:
        sys.stdout.write("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() + "\n")
