"""Times of a run on one clock that never steps.

A wall clock may be set while a run is under way. Moments and step records therefore carry a steady clock beside the
wall clock, and every duration is taken from it. The wall clock decides only where no steady clock reaches: over a
restart of the machine, and in records that an older version wrote.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from polyreme.run_files.timeline import Moment
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import StepTable, table_of

Steps = Mapping[int, Sequence[StepRecord]]
"""Step records by attempt."""


def without_clock_steps(moments: Sequence[Moment], steps: Steps) -> tuple[list[Moment], Steps]:
    """Return moments and records as a clock would have shown them that was never set after the first moment."""
    even: list[Moment] = []
    for before, moment in zip([None, *moments], moments, strict=False):
        passed_s = 0.0 if before is None else seconds_between(before, moment)
        at_s = even[-1].at_s + passed_s if even else moment.at_s
        even.append(dataclasses.replace(moment, at_s=at_s))
    starts = {
        moment.attempt: (moment, at.at_s) for moment, at in zip(moments, even, strict=True) if moment.kind == "attempt"
    }
    return even, {
        attempt: _moved(table_of(records), *starts[attempt]) if attempt in starts else records
        for attempt, records in steps.items()
    }


def seconds_between(before: Moment, after: Moment) -> float:
    """Return the time that passed between two moments, never less than zero."""
    if before.boot and before.boot == after.boot:
        return max(0.0, after.steady_s - before.steady_s)
    return max(0.0, after.at_s - before.at_s)


def _moved(table: StepTable, start: Moment, start_s: float) -> StepTable:
    ends = zip(table.column("ended_steady_s"), table.column("ended_at_s"), strict=True)
    passed_s = [steady_s - start.steady_s if steady_s and start.boot else at_s - start.at_s for steady_s, at_s in ends]
    return table.with_column("ended_at_s", [start_s + each_s for each_s in passed_s])
