"""Records of a run in its checkpoint root: resume points, step records, checkpoints, the held-out result."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme.run_files.logs import last_lines, rank_files
from polyreme.run_files.paths import RunDirectory
from polyreme_api.checkpoint_inventory import State, Survey, survey
from polyreme_api.errors import InvalidConfigError, PolyremeError, RefusedError
from polyreme_api.history import START_KEY, ResumePoint, attempt_spans, committed_steps, is_history, is_kept
from polyreme_api.job import TrainingJob
from polyreme_api.mixture import MixtureRecord
from polyreme_api.progress import CheckpointRef, StepRecord
from polyreme_api.step_columns import StepTable, decode, parse_steps, table_of
from polyreme_api.store import ObjectInfo, ObjectStore
from polyreme_api.urls import is_bucket
from polyreme_datahub.objects import bucket_of, open_store
from polyreme_launcher.urls import checkpoint_folder, local_folder

LOG_LINES_MAX = 200
"""Lines of a rank's log, from its end, among which its error is looked for."""
ERROR_MARK = " ERROR "
_STEPS_KEY = re.compile(r"steps/a([0-9]{6,7})(?:-([0-9]{5,}))?\.jsonl")
_COLUMNS_KEY = re.compile(r"steps/a([0-9]{6,7})-c[0-9]{5,}\.columns")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StepBytes:
    """The most step records that someone who waits has read."""

    lines: int
    """Records that no segment covers."""
    columns: int
    """Segments."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint."""

    name: str
    reference: CheckpointRef
    committed: bool
    """Whether its marker was written and its files are there in full; else it is torn or damaged and never loaded."""
    history: bool
    """Whether it lies on the committed history."""
    size_bytes: int
    held_out_loss: float | None = None
    """After its step; None where none was measured."""
    why: str = ""
    """What is wrong with it."""
    damaged: bool = False
    """Whether it was committed and something of it is gone or changed since."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Everything that the ranks of all attempts recorded."""

    points: Sequence[ResumePoint]
    steps: Mapping[int, Sequence[StepRecord]]
    """Step records of each attempt, thrown-away ones included."""
    checkpoints: Sequence[CheckpointEntry]
    evaluation: Mapping[str, Any] | None
    """Newest held-out result."""
    routing: Mapping[str, Any] | None = None
    """Newest table of where tokens went, by layer and expert."""

    @property
    def mixture(self) -> MixtureRecord | None:
        """Changes of the mixture that the newest attempt trains by; see ``ResumePoint.mixture``."""
        return max(self.points, key=lambda point: point.attempt).mixture if self.points else None

    @property
    def history(self) -> Sequence[StepRecord]:
        """The committed history: each step once, in order."""
        return committed_steps(self.points, self.steps)

    @property
    def discarded(self) -> Sequence[StepRecord]:
        """Steps that were trained and are not history."""
        spans, parts = attempt_spans(self.points), list[StepTable]()
        for attempt, records in self.steps.items():
            table, span = table_of(records), spans.get(attempt)
            parts.append(table.take([at for at, step in enumerate(table.column("step")) if not is_kept(step, span)]))
        return StepTable.join(parts)


def checkpoint_url(run: RunDirectory, job: TrainingJob) -> str:
    """URL of a job's checkpoint root: a folder of this machine, or a bucket.

    Raises:
        InvalidConfigError: If the location is neither.
    """
    location = job.spec.checkpoint.location
    if location is None:
        return run.checkpoints.as_uri()
    try:
        bucket_of(location) if is_bucket(location) else local_folder(location, field="")
    except InvalidConfigError as error:
        raise InvalidConfigError(f"{error.message} or s3://bucket/prefix", field="spec.checkpoint.location") from error
    return location


def read_records_at(url: str, *, most: StepBytes | None = None) -> RunRecords:
    """Read a checkpoint root by its URL.

    Raises:
        RefusedError: If a resume point is damaged, or there are more step records than ``most``.
        StoreFailedError: If the store stays away.
    """
    folder = checkpoint_folder(url)
    if folder is not None and not folder.is_dir():
        return RunRecords(points=(), steps={}, checkpoints=(), evaluation=None)
    return read_records_in(open_store(url), most=most)


def read_records_in(store: ObjectStore, *, most: StepBytes | None = None) -> RunRecords:
    """Read a checkpoint root by its store, as ``read_records_at``."""
    seen = survey(store)
    tables = [info.key for info in store.list("routing/a")]
    return RunRecords(
        points=seen.points,
        steps=read_steps(store, most=most),
        checkpoints=_entries(seen),
        evaluation=read_evaluation(store),
        routing=json.loads(store.get(tables[-1])) if tables else None,
    )


def read_evaluation(store: ObjectStore) -> Mapping[str, Any] | None:
    """Read the newest held-out result; None before the first."""
    results = [info.key for info in store.list("evaluation/a")]
    return dict(json.loads(store.get(results[-1]))) if results else None


def step_parts(store: ObjectStore) -> Iterator[tuple[int, ObjectInfo]]:
    """Yield attempt and object of all step records; those of a bucket lie in parts, whose keys are in order."""
    for info in store.list("steps/a"):
        if (match := _STEPS_KEY.fullmatch(info.key)) is not None:
            yield int(match[1]), info


def read_start(url: str) -> str:
    """Return what a run took over from the checkpoint that it began with; empty where that is not known."""
    try:
        return str(json.loads(open_store(url).get(START_KEY))["words"])
    except (PolyremeError, ValueError, KeyError):
        return ""


def read_points(url: str) -> Sequence[ResumePoint]:
    """Read the resume points of a checkpoint root by its URL, in the order of their attempts.

    Raises:
        StoreFailedError: If the store stays away.
    """
    folder = checkpoint_folder(url)
    return () if folder is not None and not folder.is_dir() else survey(open_store(url)).points


def read_records(root: Path) -> RunRecords:
    """Read a checkpoint root on this machine; a folder that does not exist is a run that has not begun."""
    return read_records_at(root.absolute().as_uri())


def last_error(run: RunDirectory, attempt: int) -> str | None:
    """Return the newest error that a rank of the attempt wrote into its log; None when there is none."""
    for _, path in rank_files(run, attempt=attempt):
        for line in reversed(last_lines(path, LOG_LINES_MAX)):
            if ERROR_MARK in line:
                return line.partition(ERROR_MARK)[2].strip()
    return None


def read_steps(store: ObjectStore, *, most: StepBytes | None = None) -> dict[int, StepTable]:
    """Read step records by attempt: the columns of closed segments, and the lines that follow.

    Raises:
        RefusedError: If there are more bytes of them than ``most``; no line is read then.
    """
    closed: dict[int, list[ObjectInfo]] = {}
    parts: dict[int, dict[int, ObjectInfo]] = {}
    for info in store.list("steps/a"):
        if (match := _COLUMNS_KEY.fullmatch(info.key)) is not None:
            closed.setdefault(int(match[1]), []).append(info)
        elif (match := _STEPS_KEY.fullmatch(info.key)) is not None:
            parts.setdefault(int(match[1]), {})[int(match[2] or 0)] = info
    if most is not None:
        _check_bytes(sum(info.size_bytes for each in closed.values() for info in each), most.columns, "columns")
    read = {attempt: _segments_of(store, closed.get(attempt, ()), logs) for attempt, logs in parts.items()}
    if most is not None:
        _check_bytes(
            sum(part.size_bytes - start for _, left in read.values() for part, start in left), most.lines, "lines"
        )
    return {attempt: StepTable.join([*tables, *_lines_of(store, left)]) for attempt, (tables, left) in read.items()}


def _check_bytes(size: int, most: int, what: str) -> None:
    if size > most:
        raise RefusedError(
            f"{size / 2**20:.1f} MiB of step records in {what}, expected at most {most // 2**20} for a page; see the "
            "run's report, or polyreme runs export"
        )


def _segments_of(
    store: ObjectStore, closed: Sequence[ObjectInfo], parts: Mapping[int, ObjectInfo]
) -> tuple[list[StepTable], list[tuple[ObjectInfo, int]]]:
    """Return an attempt's closed segments, and what follows them in lines: objects, each with where to begin."""
    tables, position, unit = list[StepTable](), 0, "bytes"
    for info in closed:
        segment = decode(store.get(info.key))
        if segment is None or segment.start != position:
            break  # the lines say the same
        tables.append(segment.table)
        position, unit = segment.end, segment.unit
    offset = position if unit == "bytes" else 0
    first = position if unit == "parts" else 0
    return tables, [(info, offset if part == 0 else 0) for part, info in sorted(parts.items()) if part >= first]


def _lines_of(store: ObjectStore, left: Sequence[tuple[ObjectInfo, int]]) -> Iterator[StepTable]:
    for info, start in left:
        lines = store.get_range(info.key, start=start, length=info.size_bytes - start)
        yield StepTable.of(parse_steps(lines))


def _entries(seen: Survey) -> list[CheckpointEntry]:
    spans = attempt_spans(seen.points)
    return [
        CheckpointEntry(
            name=stored.name,
            reference=stored.reference,
            # What is of another format exists; only this version can't read it, and says so when it is asked to.
            committed=(committed := stored.state in {State.WHOLE, State.FOREIGN, State.REJECTED}),
            history=committed and stored.state is not State.REJECTED and is_history(stored.reference, spans),
            damaged=stored.state is State.DAMAGED,
            size_bytes=stored.size_bytes,
            held_out_loss=stored.held_out_loss,
            why=stored.why,
        )
        for stored in seen.checkpoints
    ]
