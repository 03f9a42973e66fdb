"""Progress of flows by operation: how many records are done, how fast, and how long the rest takes. Thread-safe."""

from __future__ import annotations

import dataclasses
import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence

from polyreme_datahub.registry.rows import OperationCount
from polyreme_datahub.registry.work_items import WorkItem


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationProgress:
    """How far one operation is, in records."""

    operation: str
    done: int
    """Records that it is done with, those included that ended before it."""
    total: int
    made: int = 0
    reused: int = 0
    dead: int = 0
    dropped: int = 0
    rate_per_s: float | None = None
    """Records a second that this operation worked on, since its first one; None: it worked on none."""
    left_s: float | None = None
    """Time to go at this rate [s]; None: not known yet."""

    @property
    def backlog(self) -> int:
        """Records that wait for it."""
        return self.total - self.done


OnProgress = Callable[[OperationProgress], None]
"""Takes the progress of an operation; called from worker threads."""


class FlowMeter:
    """Adds up what commits brought.

    Args:
        operations: Names, in order.
        total: Records.
        steady_s: Steady clock [s].
        report: Called with the progress of an operation after each change.
    """

    def __init__(
        self, operations: Sequence[str], *, total: int, steady_s: Callable[[], float], report: OnProgress | None
    ) -> None:
        self._operations, self._total = tuple(operations), total
        self._steady_s, self._report = steady_s, report or (lambda _progress: None)
        self._known: dict[str, int] = {}
        self._counts = {name: OperationCount(operation=name) for name in operations}
        self._made: dict[tuple[int, str], int] = defaultdict(int)
        self._begun_s = steady_s()
        self._lock = threading.Lock()

    def know(self, done: Mapping[str, int]) -> None:
        """Take the records that each operation was done with before, or that other processes are done with."""
        with self._lock:
            self._known |= {name: max(count, self._known.get(name, 0)) for name, count in done.items()}

    def add(self, item: WorkItem, counts: Sequence[OperationCount]) -> None:
        """Take the counts of one commit."""
        with self._lock:
            for count in counts:
                self._counts[count.operation] += count
                self._made[item.version_id, count.operation] += count.misses
        self.show([count.operation for count in counts])

    def show(self, operations: Sequence[str]) -> None:
        """Report the progress of some operations."""
        with self._lock:
            shown = [self._progress(name) for name in operations]
        for one in shown:
            self._report(one)

    def show_other(self, operation: str, *, done: int, total: int) -> None:
        """Report something that is not counted in records."""
        self._report(OperationProgress(operation=operation, done=done, total=total))

    def made(self, version_id: int, operation: str) -> int:
        """Return how many outputs an operation made of a version in this run."""
        with self._lock:
            return self._made[version_id, operation]

    def finish(self, counts: Sequence[OperationCount], *, total: int | None = None) -> None:
        """Report each operation as done, with its exact counts."""
        for count in counts:
            records = self._total if total is None else total
            self._report(self._of(count, records, records))

    def _progress(self, operation: str) -> OperationProgress:
        upto = self._operations[: self._operations.index(operation) + 1]
        ended = sum(self._counts[name].dead + self._counts[name].dropped for name in upto)
        count = self._counts[operation]
        done = min(self._total, self._known.get(operation, 0) + ended + count.hits + count.misses)
        return self._of(count, done, self._total)

    def _of(self, count: OperationCount, done: int, total: int) -> OperationProgress:
        seen, spent_s = self._counts[count.operation], self._steady_s() - self._begun_s
        worked = seen.misses + seen.dead + seen.dropped
        rate = worked / spent_s if worked and spent_s > 0 else None
        left_s = 0.0 if done == total else None
        return OperationProgress(
            operation=count.operation,
            done=done,
            total=total,
            made=count.misses,
            reused=count.hits,
            dead=count.dead,
            dropped=count.dropped,
            rate_per_s=rate,
            left_s=left_s if rate is None else (total - done) / rate,
        )
