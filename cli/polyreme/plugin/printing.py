"""Formats of answers: plain columns as kubectl's, trees and bars by rich, JSON and YAML for programs."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from enum import StrEnum
from typing import Any, TextIO

from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from polyreme.views.output import OUTPUT_VERSION, text

WIDE_COLUMNS = 4_000
"""Width where the output is no terminal: a line is never broken there."""


class Output(StrEnum):
    """Output format."""

    TABLE = "table"
    WIDE = "wide"
    JSON = "json"
    YAML = "yaml"
    NAME = "name"


def is_data(output: Output) -> bool:
    """Tell whether a program reads the answer."""
    return output in {Output.JSON, Output.YAML}


def show(*parts: RenderableType, stream: TextIO | None = None) -> None:
    """Write renderables to standard output; colours and the terminal's width only where a person looks."""
    to = stream or sys.stdout
    console = Console(file=to, width=None if to.isatty() else WIDE_COLUMNS, highlight=False, soft_wrap=not to.isatty())
    for part in parts:
        with console.capture() as captured:
            console.print(part)
        to.write("".join(line.rstrip() + "\n" for line in captured.get().splitlines()))


def emit_data(value: Any, output: Output) -> None:
    """Write a value for a program."""
    if output is Output.YAML:
        import yaml

        sys.stdout.write(yaml.safe_dump(value, sort_keys=False, allow_unicode=True))
    else:
        sys.stdout.write(json.dumps(value, indent=2) + "\n")


def envelope(kind: str, value: Any) -> dict[str, Any]:
    """Put an answer of our own, which is no object of the cluster, under its kind and version."""
    return {"version": OUTPUT_VERSION, "kind": kind, "items" if isinstance(value, list) else "item": value}


def emit_names(names: Iterable[str]) -> None:
    """Write names that kubectl takes as arguments, one a line."""
    for name in names:
        sys.stdout.write(f"trainingjob.polyreme.dev/{name}\n")


def columns(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> Table:
    """Return plain columns, as kubectl's."""
    table = Table(box=None, pad_edge=False, padding=(0, 3, 0, 0), header_style="bold")
    for heading in headings:
        table.add_column(heading, no_wrap=True, overflow="ignore")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(text(cell)) for cell in row))
    return table


def facts(pairs: Iterable[tuple[str, Any]]) -> Table:
    """Return lines of ``name  value``; what has no value is left out."""
    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for name, value in pairs:
        if value is not None and value != "":
            table.add_row(name, value if isinstance(value, Text) else Text(text(value)))
    return table


def bar(used: int, whole: int, *, width: int) -> Text:
    """Return ``[####....]``: what is used of the whole; what is borrowed beyond it as ``+``."""
    scale = max(whole, used, 1)
    own, borrowed = min(used, whole), max(0, used - whole)
    filled = _cells(own, scale, width)
    beyond = min(width - filled, _cells(borrowed, scale, width)) if borrowed else 0
    bar_ = Text("[")
    bar_.append("#" * filled, style="green")
    bar_.append("+" * beyond, style="yellow")
    bar_.append("." * (width - filled - beyond), style="dim")
    return bar_.append("]")


def _cells(part: int, scale: int, width: int) -> int:
    """Cells of a part: none only for nothing, all only for everything."""
    if part <= 0:
        return 0
    return max(1, width if part == scale else min(width - 1, round(part * width / scale)))
