"""Progress of data operations: a live table on a terminal, a plain line now and then everywhere else.

Everything goes to standard error.
"""

from __future__ import annotations

import math
import threading
from types import TracebackType
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from polyreme.views.formatting import NOTHING, duration
from polyreme.views.live_screen import LiveScreen
from polyreme_api.clock import Clock

if TYPE_CHECKING:
    from polyreme_datahub.runner.flow_meter import OperationProgress

LINE_EVERY_S = 5.0
"""Least time between two plain lines."""
DRAW_EVERY_S = 0.2
BAR_WIDTH = 20
ROWS_MAX = 64


class OperationTable(LiveScreen):
    """Shows operations in the order in which they were first reported: ``with OperationTable(clock) as table: ...``."""

    def __init__(self, clock: Clock, console: Console | None = None) -> None:
        super().__init__(console)
        self._clock = clock
        self._rows: dict[str, OperationProgress] = {}
        self._shown_s = -math.inf
        self._lock = threading.Lock()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Draw the last state, and end."""
        with self._lock:
            self.draw(render_operations(self._rows))
            super().__exit__(kind, error, trace)

    def show(self, progress: OperationProgress) -> None:
        """Take the progress of one operation; callable from any thread."""
        with self._lock:
            if len(self._rows) < ROWS_MAX or progress.operation in self._rows:
                self._rows[progress.operation] = progress
            now_s = self._clock.steady_s()
            if now_s - self._shown_s < (DRAW_EVERY_S if self.is_live else LINE_EVERY_S):
                return
            self._shown_s = now_s
            if self.is_live:
                self.draw(render_operations(self._rows))
            else:
                self.console.print(Text(plain_operation(progress)), highlight=False, soft_wrap=True)


def render_operations(rows: dict[str, OperationProgress]) -> Table:
    """Return the table of all operations."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    for heading in ("operation", "", "done", "rate", "backlog", "failed", "dropped", "to go"):
        table.add_column(heading, no_wrap=True, justify="left" if heading in {"operation", ""} else "right")
    for row in rows.values():
        table.add_row(
            Text(row.operation),
            ProgressBar(
                total=max(row.total, 1),
                completed=row.done if row.total else 1,
                width=BAR_WIDTH,
                complete_style="cyan",
                finished_style="green",
            ),
            f"{row.done:,}/{row.total:,}",
            _rate(row),
            f"{row.backlog:,}",
            f"{row.dead:,}",
            f"{row.dropped:,}",
            duration(row.left_s),
        )
    return table


def plain_operation(row: OperationProgress) -> str:
    """Return one operation as a line, for logs."""
    return (
        f"{row.operation} | {row.done:,}/{row.total:,} | {_rate(row)} | {row.dead:,} failed | "
        f"{row.dropped:,} dropped | {duration(row.left_s)} to go"
    )


def _rate(row: OperationProgress) -> str:
    return NOTHING if row.rate_per_s is None else f"{row.rate_per_s:,.1f}/s"
