"""How an attempt spent its time: starting, training steps that are history, work that was lost, finishing."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme.report.data import AttemptRow
from polyreme_api.progress import StepRecord

STARTING, TRAINING, LOST, FINISHING = "starting", "training", "lost", "finishing"


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

    What follows the last step that is history is evaluation and export when the attempt succeeded, else it is lost;
    while the attempt runs, it is training.

    Args:
        attempt: The attempt.
        committed: Steps of this attempt that are history.
        thrown_away: Steps of this attempt that are not.
        now_s: End of an attempt that still runs.
    """
    ended_s = max(attempt.ended_s if attempt.ended_s is not None else now_s, attempt.started_s)
    records = sorted([*committed, *thrown_away], key=lambda record: record.ended_at_s)
    if not records:
        return _without_empty([Span(kind=STARTING, from_s=attempt.started_s, until_s=ended_s)])
    begun_s = min(max(records[0].ended_at_s - records[0].step_s, attempt.started_s), ended_s)
    kept_s = min(max((record.ended_at_s for record in committed), default=begun_s), ended_s)
    after = FINISHING if attempt.succeeded else TRAINING if attempt.ended_s is None else LOST
    return _without_empty(
        [
            Span(kind=STARTING, from_s=attempt.started_s, until_s=begun_s),
            Span(kind=TRAINING, from_s=begun_s, until_s=max(kept_s, begun_s)),
            Span(kind=after, from_s=max(kept_s, begun_s), until_s=ended_s),
        ]
    )


def end_of(attempt: AttemptRow) -> str:
    """Say in a word how an attempt ended."""
    return attempt.cause or ("succeeded" if attempt.succeeded else "running" if attempt.ended_s is None else "ended")


def _without_empty(spans: list[Span]) -> list[Span]:
    return [span for span in spans if span.seconds > 0]
