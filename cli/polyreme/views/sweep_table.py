"""Live view of a sweep: the runs that are running, on a terminal only; elsewhere each start and end has its line."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from rich.console import Group
from rich.table import Table
from rich.text import Text

from polyreme.views.formatting import NOTHING
from polyreme.views.live_screen import LiveScreen
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


class SweepView(LiveScreen):
    """Shows a sweep on standard error: ``with SweepView() as view: view.show(rows, summary)``."""

    def show(self, rows: Sequence[SweepRow], summary: str) -> None:
        """Show the runs that are running, and how many are in which state."""
        table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
        for heading in ("run", "state", "step", "loss", "held out"):
            table.add_column(heading, no_wrap=True)
        for row in rows:
            step = f"{row.step}/{row.steps or NOTHING}"
            table.add_row(Text(row.name), row.state, step, text(row.loss), text(row.held_out_loss))
        self.draw(Group(Text(summary), *([table] if rows else [])))
