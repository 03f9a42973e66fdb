"""Records of a run: one line per step on disk, the newest state to the launcher; from rank 0 only."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO

from polyreme_api.clock import Clock
from polyreme_api.history import columns_key, steps_key
from polyreme_api.progress import (
    ALL_SETS,
    NOTICE_CHARACTERS_MAX,
    CheckpointRef,
    ProgressRecord,
    ProgressSink,
    RankPhase,
    RoutingByLayer,
    StepRecord,
)
from polyreme_api.rank_state import RankActivity
from polyreme_api.step_columns import Segment, StepTable, Unit, encode, parse_steps
from polyreme_api.store import ObjectStore, StoreFailedError
from polyreme_trainer.rank_page import enter_activity

FLUSH_STEPS_MAX = 100
"""Steps of an attempt that are in no object yet."""
PART_STEPS_MAX = 1000
"""Steps of one object; about 300 KB."""
SEGMENT_STEPS = 10_000
"""Steps of a closed segment, at least."""
_ACTIVITIES = {
    RankPhase.STARTING: RankActivity.STARTING,
    RankPhase.LOADING: RankActivity.LOADING,
    RankPhase.WAITING_FOR_DATA: RankActivity.DATA_WAIT,
    RankPhase.SCORING: RankActivity.SCORING,
    RankPhase.CHECKPOINTING: RankActivity.CHECKPOINTING,
    RankPhase.EVALUATING: RankActivity.EVALUATING,
    RankPhase.EXPORTING: RankActivity.EXPORTING,
    RankPhase.DONE: RankActivity.DONE,
}
"""What a rank is busy with in the phases that are entered by name; steps are entered one by one."""


class Reporter:
    """Keeps the newest progress record and hands every change to the sink; silent on all ranks but the first."""

    def __init__(self, sink: ProgressSink | None, clock: Clock, first: ProgressRecord) -> None:
        self._sink = sink
        self.clock = clock
        self._record = first
        # A finished checkpoint is reported from the saving thread: neither report may overwrite the other's change.
        self._lock = threading.Lock()

    def phase(self, phase: RankPhase, *, message: str = "") -> None:
        """Report the phase of the ranks, and record it on this rank's page."""
        enter_activity(_ACTIVITIES[phase])
        self._report({"phase": phase, "message": message})

    def note(self, words: str) -> None:
        """Report what a user should know while this attempt trains; the newest such sentence is kept."""
        self._report({"notice": words[:NOTICE_CHARACTERS_MAX]})

    def stopped_early(self, words: str) -> None:
        """Report why no further step is trained; empty: all are trained."""
        if words:
            self._report({"stopped_early": words[:NOTICE_CHARACTERS_MAX]})

    def resumed(self, step: int) -> None:
        """Report the step after which this attempt resumes."""
        self._report({"resumed_from_step": step, "step": step})

    def steps(self, steps: int) -> None:
        """Report the step with which the run ends."""
        self._report({"steps": steps})

    def step(self, step: StepRecord, routing: RoutingByLayer | None = None) -> None:
        """Report that a step is done, and how its tokens were routed."""
        self._report(
            {
                "phase": RankPhase.TRAINING,
                "message": "",
                "step": step.step,
                "loss": step.loss,
                "routing": routing,
                "objective": step.objective,
                "stage": step.stage,
                **({"held_out_loss": step.held_out[ALL_SETS], "held_out_step": step.step} if step.held_out else {}),
                "step_seconds": step.step_s,
                "data_wait_seconds": self._record.data_wait_seconds + step.data_wait_s,
                "trained_seconds": self._record.trained_seconds + step.step_s,
                "tokens_per_second": step.tokens / step.step_s if step.step_s else None,
            }
        )

    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        """Count the time for which the ranks wait for a save; it is reported with the next change."""
        yield from self._timed("checkpoint_seconds")

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Count the time of held-out samples, answers and the export; it is reported with the next change."""
        yield from self._timed("evaluation_seconds")

    def _timed(self, name: str) -> Iterator[None]:
        begun_s = self.clock.steady_s()
        yield
        with self._lock:
            spent_s = getattr(self._record, name) + self.clock.steady_s() - begun_s
            self._record = self._record.model_copy(update={name: spent_s})

    def checkpoint(self, reference: CheckpointRef) -> None:
        """Report that a checkpoint is durable."""
        self._report({"checkpoint": reference})

    def _report(self, change: dict[str, object]) -> None:
        with self._lock:
            self._record = self._record.model_copy(update={**change, "updated_at_s": self.clock.now_s()})
            if self._sink is not None:
                self._sink.report(self._record)


class _Segments:
    """Writes the columns of closed segments of a log, which readers then need not parse.

    A segment is read back from the log, so nothing is kept in memory. One that the store does not give or take is no
    loss: the next one contains it.

    Args:
        store: The checkpoint root.
        attempt: The attempt.
        unit: In what the log counts.
    """

    def __init__(self, store: ObjectStore, attempt: int, unit: Unit) -> None:
        self._store, self._attempt, self._unit = store, attempt, unit
        self._number = self._start = 0

    def close(self, end: int, read: Callable[[int, int], bytes]) -> None:
        """Write the segment from the end of the last one to ``end``."""
        with contextlib.suppress(StoreFailedError):
            records = StepTable.of(parse_steps(read(self._start, end)))
            segment = Segment(table=records, unit=self._unit, start=self._start, end=end)
            self._store.put(columns_key(self._attempt, self._number), encode(segment))
            self._number, self._start = self._number + 1, end


@dataclasses.dataclass(slots=True)
class StepLog:
    """``steps/a<attempt>.jsonl``: flushed every step; a torn last line is ignored by readers."""

    file: BinaryIO | None
    segments: _Segments | None = None
    _open_steps: int = 0
    """Steps since the last closed segment."""

    def write(self, record: StepRecord) -> None:
        """Append one step, which the optimizer of this rank has already taken."""
        if self.file is not None:
            self.file.write(_line(record))
            self.file.flush()
            self._open_steps += 1

    def flush(self) -> None:
        """Be at least as durable as the checkpoint that is about to be saved."""
        if self.file is None:
            return
        os.fsync(self.file.fileno())
        if self.segments is not None and self._open_steps >= SEGMENT_STEPS:
            self.segments.close(self.file.tell(), self._read)
            self._open_steps = 0

    def _read(self, start: int, end: int) -> bytes:
        assert self.file is not None, "only an open log is read back"
        return os.pread(self.file.fileno(), end - start, start)


class ObjectStepLog:
    """A step log for stores without append: parts of some lines each, the last one rewritten.

    It is written before each save, so that no checkpoint is ahead of its records, and at least every
    ``FLUSH_STEPS_MAX`` steps.
    """

    def __init__(self, store: ObjectStore, attempt: int) -> None:
        self._store = store
        self._attempt = attempt
        self._part = 0
        self._lines: list[bytes] = []
        self._unwritten = 0
        self._segments, self._closed = _Segments(store, attempt, "parts"), 0

    def write(self, record: StepRecord) -> None:
        """Append one step."""
        self._lines.append(_line(record))
        self._unwritten += 1
        if self._unwritten == FLUSH_STEPS_MAX:
            self.flush()

    def flush(self) -> None:
        """Write what is not written yet.

        Raises:
            StoreFailedError: If the store does not take it.
        """
        if self._unwritten:
            self._store.put(steps_key(self._attempt, self._part), b"".join(self._lines))
            self._unwritten = 0
        if len(self._lines) >= PART_STEPS_MAX:
            self._part += 1
            self._lines = []
            if self._part - self._closed >= SEGMENT_STEPS // PART_STEPS_MAX:
                self._segments.close(self._part, self._read)
                self._closed = self._part

    def _read(self, start: int, end: int) -> bytes:
        return b"".join(self._store.get(steps_key(self._attempt, part)) for part in range(start, end))


def _line(record: StepRecord) -> bytes:
    return record.model_dump_json(by_alias=True).encode() + b"\n"


@contextlib.contextmanager
def open_step_log(
    store: ObjectStore, folder: Path | None, attempt: int, *, rank: int
) -> Iterator[StepLog | ObjectStepLog]:
    """Open the log of this attempt for appending, on rank 0.

    Raises:
        StoreFailedError: At the end, if the store does not take the last records.
    """
    if rank:
        yield StepLog(None)
        return
    if folder is None:
        log = ObjectStepLog(store, attempt)
        yield log
        log.flush()
        return
    path = folder / steps_key(attempt)
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+b") as file:
        yield StepLog(file, _Segments(store, attempt, "bytes"))
        os.fsync(file.fileno())
