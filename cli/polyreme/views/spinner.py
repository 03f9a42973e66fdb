"""A sign of life while something takes long: on a terminal a bar with the time so far, elsewhere nothing."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


@contextlib.contextmanager
def busy(words: str, console: Console | None = None) -> Iterator[Callable[[str], None]]:
    """Show, on standard error, that work is being done; yields what changes the words. The bar goes when it is done."""
    shown = console if console is not None else Console(stderr=True)
    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=shown, transient=True, disable=not shown.is_terminal) as progress:
        task = progress.add_task(words, total=None)
        yield lambda changed: progress.update(task, description=changed)
