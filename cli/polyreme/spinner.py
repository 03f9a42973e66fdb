"""A sign of life while something takes long: on a terminal a bar with the time so far, elsewhere nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def busy(words: str, console: Console | None = None) -> Iterator[None]:
    """Show, on standard error, that work is being done; the bar goes when it is."""
    shown = console if console is not None else Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        progress.add_task(words, total=None)
        yield
