"""Progress of a flow by operation: how many records are done, how fast, and how long the rest takes. Thread-safe."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from polyreme_datahub.registry.rows import StageCount


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationProgress:
    """How far one operation is, in records."""

    operation: str
    done: int
    """Records that it is done with, those included that ended before it."""
    total: int
    made: int
    reused: int
    dead: int
    dropped: int
    rate_per_s: float | None
    """Records a second that this operation worked on, since its first one; None: it worked on none."""
    left_s: float | None
    """Time to go at this rate [s]; None: not known yet."""

    @property
    def backlog(self) -> int:
        """Records that wait for it."""
        return self.total - self.done


class FlowMeter:
    """Adds up what commits brought.

    Args:
        operations: Names, in order.
        total: Records.
        before: Records that each operation was done with before this run.
        steady_s: Steady clock [s].
        report: Called with the progress of an operation after each change, from worker threads.
    """

    def __init__(
        self,
        operations: Sequence[str],
        *,
        total: int,
        before: Mapping[str, int],
        steady_s: Callable[[], float],
        report: Callable[[OperationProgress], None] | None,
    ) -> None:
        self._operations, self._total, self._before = tuple(operations), total, dict(before)
        self._steady_s, self._report = steady_s, report
        self._counts = {name: StageCount(stage=name) for name in operations}
        self._begun_s = steady_s()
        self._lock = threading.Lock()

    def add(self, counts: Sequence[StageCount]) -> None:
        """Take the counts of one commit."""
        with self._lock:
            for count in counts:
                if count.stage in self._counts:
                    self._counts[count.stage] += count
            shown = [self._progress(count.stage) for count in counts if count.stage in self._counts]
        if self._report is not None:
            for one in shown:
                self._report(one)

    def made(self, operation: str) -> int:
        """Return how many outputs an operation made in this run."""
        with self._lock:
            return self._counts[operation].misses

    def finish(self, counts: Sequence[StageCount], *, total: int | None = None) -> None:
        """Report each operation as done, with its exact counts."""
        if self._report is None:
            return
        for count in counts:
            records = self._total if total is None else total
            self._report(
                OperationProgress(
                    operation=count.stage,
                    done=records,
                    total=records,
                    made=count.misses,
                    reused=count.hits,
                    dead=count.dead,
                    dropped=count.dropped,
                    rate_per_s=self._rate(count.stage),
                    left_s=0.0,
                )
            )

    def _rate(self, operation: str) -> float | None:
        count = self._counts.get(operation, StageCount(stage=operation))
        worked = count.misses + count.dead + count.dropped
        spent_s = self._steady_s() - self._begun_s
        return worked / spent_s if worked and spent_s > 0 else None

    def _progress(self, operation: str) -> OperationProgress:
        upto = self._operations[: self._operations.index(operation) + 1]
        ended = sum(self._counts[name].dead + self._counts[name].dropped for name in upto)
        count, rate = self._counts[operation], self._rate(operation)
        done = min(self._total, self._before.get(operation, 0) + ended + count.hits + count.misses)
        return OperationProgress(
            operation=operation,
            done=done,
            total=self._total,
            made=count.misses,
            reused=count.hits,
            dead=count.dead,
            dropped=count.dropped,
            rate_per_s=rate,
            left_s=None if rate is None else (self._total - done) / rate,
        )
