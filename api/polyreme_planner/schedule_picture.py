"""A pipeline's schedule as text: one row per rank, time from left to right."""

from __future__ import annotations

from polyreme_planner.pipeline_simulation import Simulated
from polyreme_planner.schedules import Work

WIDTH = 100
"""Columns of time, by default."""
WAITING = "."
LEGEND = "F forward, B backward, I and W its halves; small letters: the rank's later stage; . waiting"


def picture(simulated: Simulated, *, width: int = WIDTH) -> list[str]:
    """Draw a simulated schedule; each column shows what its rank does in the middle of that time."""
    if simulated.makespan_s <= 0:
        return []
    margin = len(f"rank {len(simulated.spans) - 1}")
    rows = []
    for rank, spans in enumerate(simulated.spans):
        first = min((work.stage for span in spans for work in span.slot), default=0)
        cells, at = [], 0
        for column in range(width):
            now_s = (column + 0.5) * simulated.makespan_s / width
            while at < len(spans) and spans[at].end_s <= now_s:
                at += 1
            if at == len(spans) or now_s < spans[at].begin_s:
                cells.append(WAITING)
                continue
            span = spans[at]
            share = (now_s - span.begin_s) / (span.end_s - span.begin_s)
            # Two pieces that overlap share their columns, one after another.
            cells.append(_letter(span.slot[min(len(span.slot) - 1, int(share * len(span.slot)))], first))
        rows.append(f"{f'rank {rank}':<{margin}}  {''.join(cells)}")
    return rows


def _letter(work: Work, first: int) -> str:
    return work.kind.value if work.stage == first else work.kind.value.lower()
