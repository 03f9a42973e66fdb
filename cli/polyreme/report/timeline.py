"""Uses of an attempt's time: getting ready, steps that are history, pauses, lost work, hangs, finishing."""

from __future__ import annotations

import dataclasses
import operator
from collections import defaultdict
from collections.abc import Sequence

from polyreme.report.data import AttemptRow, TimeShare
from polyreme_api.progress import StepRecord
from polyreme_api.step_columns import by_attempt, column_of

STARTING, TRAINING, LOST, HUNG, STOPPED, FINISHING = "starting", "training", "lost", "hung", "stopped", "finishing"
KINDS = (STARTING, TRAINING, LOST, HUNG, STOPPED, FINISHING)
CAUSE_HUNG = "Hung"
STOPPED_NAME = "Stopped on request"
STEPS_NAME = "Retained steps"
DATA_WAIT_NAME = "Steps waiting for data"
PAUSES_NAME = "Between steps: checkpoints, held-out loss"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """A stretch of wall time [s since the epoch]."""

    kind: str
    from_s: float
    until_s: float

    @property
    def seconds(self) -> float:
        """Length [s]."""
        return self.until_s - self.from_s


def attempt_spans(
    attempt: AttemptRow, *, committed: Sequence[StepRecord], thrown_away: Sequence[StepRecord], now_s: float
) -> list[Span]:
    """Split an attempt's time.

    Steps that are not history are lost. What follows the last step is evaluation and export when the attempt succeeded,
    a hang or a stop when it ended by one, and else lost; while the attempt runs, it is training.

    Args:
        attempt: The attempt.
        committed: Steps of this attempt that are history.
        thrown_away: Steps of this attempt that are not.
        now_s: End of an attempt that still runs.
    """
    ended_s = max(attempt.ended_s if attempt.ended_s is not None else now_s, attempt.started_s)
    ends_s, took_s = ([*column_of(committed, name), *column_of(thrown_away, name)] for name in ("ended_at_s", "step_s"))
    if not ends_s:
        is_hung = attempt.cause == CAUSE_HUNG and not attempt.stopped
        kind = STOPPED if attempt.stopped else HUNG if is_hung else STARTING
        return _without_empty([Span(kind=kind, from_s=attempt.started_s, until_s=ended_s)])
    first_s, first_took_s = min(zip(ends_s, took_s, strict=True), key=operator.itemgetter(0))
    begun_s = min(max(first_s - first_took_s, attempt.started_s), ended_s)
    kept_s = max(min(max(column_of(committed, "ended_at_s"), default=begun_s), ended_s), begun_s)
    again_s = max(min(max(column_of(thrown_away, "ended_at_s"), default=kept_s), ended_s), kept_s)
    end = _kind_of_end(attempt)
    if end == LOST:
        again_s = kept_s
    return _without_empty(
        [
            Span(kind=STARTING, from_s=attempt.started_s, until_s=begun_s),
            Span(kind=TRAINING, from_s=begun_s, until_s=kept_s),
            Span(kind=LOST, from_s=kept_s, until_s=again_s),
            Span(kind=end, from_s=again_s, until_s=ended_s),
        ]
    )


def time_shares(
    attempts: Sequence[AttemptRow],
    *,
    committed: Sequence[StepRecord],
    thrown_away: Sequence[StepRecord],
    now_s: float,
) -> list[TimeShare]:
    """Add up what all attempts spent their time on: all of the time from the first one's start to the end."""
    sums: defaultdict[str, float] = defaultdict(float)
    kept_by_attempt, lost_by_attempt = by_attempt(committed), by_attempt(thrown_away)
    for attempt in attempts:
        kept, lost = kept_by_attempt.get(attempt.number, ()), lost_by_attempt.get(attempt.number, ())
        for span in attempt_spans(attempt, committed=kept, thrown_away=lost, now_s=now_s):
            if span.kind == TRAINING:
                steps_s = min(sum(column_of(kept, "step_s")), span.seconds)
                waits_s = min(sum(column_of(kept, "data_wait_s")), steps_s)
                sums[STEPS_NAME] += steps_s - waits_s
                sums[DATA_WAIT_NAME] += waits_s
                sums[PAUSES_NAME] += span.seconds - steps_s
            else:
                sums[_name(span, attempt, is_first=attempt is attempts[0])] += span.seconds
    return [
        TimeShare(name=name, seconds=seconds, counts=name == STEPS_NAME)
        for name, seconds in sorted(sums.items(), key=lambda item: (item[0] != STEPS_NAME, -item[1]))
        if seconds > 0
    ]


def end_of(attempt: AttemptRow) -> str:
    """Say in a word how an attempt ended."""
    if attempt.succeeded or attempt.stopped:
        return "succeeded" if attempt.succeeded else "stopped"
    return attempt.cause or ("running" if attempt.ended_s is None else "ended")


def _kind_of_end(attempt: AttemptRow) -> str:
    if attempt.succeeded or attempt.stopped:
        return FINISHING if attempt.succeeded else STOPPED
    if attempt.ended_s is None:
        return TRAINING
    return HUNG if attempt.cause == CAUSE_HUNG else LOST


def _name(span: Span, attempt: AttemptRow, *, is_first: bool) -> str:
    why = f" ({attempt.cause})" if attempt.cause else ""
    names = {
        STARTING: "First start" if is_first else f"Restarting ({attempt.scope})",
        LOST: f"Lost steps and the end of a failed attempt{why}",
        HUNG: "Hung: no steps until the restart",
        STOPPED: STOPPED_NAME,
        FINISHING: "Evaluating and exporting",
    }
    return names[span.kind]


def _without_empty(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.seconds > 0]
