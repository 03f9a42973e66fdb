"""Live view of a sweep: the runs that are running, on a terminal only; elsewhere each start and end has its line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from types import TracebackType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from polyreme.views.formatting import NOTHING
from polyreme.views.output import text


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SweepRow:
    """A run that is running."""

    name: str
    state: str
    step: int
    steps: int
    loss: float | None
    held_out_loss: float | None


class SweepView:
    """Shows a sweep on standard error: ``with SweepView() as view: view.show(rows, summary)``."""

    def __init__(self, console: Console | None = None) -> None:
        self._console = console if console is not None else Console(stderr=True)
        self._live: Live | None = None

    def __enter__(self) -> Self:
        """Begin."""
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(console=self._console, auto_refresh=False, redirect_stdout=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """End; the last state stays on the screen."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def show(self, rows: Sequence[SweepRow], summary: str) -> None:
        """Show the runs that are running, and how many are in which state."""
        if self._live is None:
            return
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
        for heading in ("run", "state", "step", "loss", "held out"):
            table.add_column(heading, no_wrap=True)
        for row in rows:
            step = f"{row.step}/{row.steps or NOTHING}"
            table.add_row(Text(row.name), row.state, step, text(row.loss), text(row.held_out_loss))
        self._live.update(Group(Text(summary), *([table] if rows else [])), refresh=True)
