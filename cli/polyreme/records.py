"""What a checkpoint root says of a run: resume points, step records, checkpoints, the held-out result."""

from __future__ import annotations

import dataclasses
import json
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from polyreme.home import RunDirectory
from polyreme.urls import local_folder
from polyreme_api.errors import InvalidConfigError, RefusedError
from polyreme_api.history import (
    COMMIT_MARKER,
    ResumePoint,
    attempt_spans,
    committed_steps,
    is_history,
    parse_checkpoint_name,
)
from polyreme_api.job import TrainingJob
from polyreme_api.marker import ForeignFormatError, parse_marker
from polyreme_api.progress import CheckpointRef, StepRecord

LOG_LINES_MAX = 200
"""Lines of a rank's log, from its end, among which its error is looked for."""
ERROR_MARK = " ERROR "


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointEntry:
    """One checkpoint directory."""

    name: str
    reference: CheckpointRef
    committed: bool
    """Whether its marker was written and its files are there in full; else the directory is torn and never loaded."""
    history: bool
    """Whether it lies on the committed history."""
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunRecords:
    """Everything that the ranks of all attempts left behind."""

    points: Sequence[ResumePoint]
    steps: Mapping[int, Sequence[StepRecord]]
    """Step records of each attempt, thrown-away ones included."""
    checkpoints: Sequence[CheckpointEntry]
    evaluation: Mapping[str, Any] | None
    """Newest held-out result."""

    @property
    def history(self) -> list[StepRecord]:
        """The committed history: each step once, in order."""
        return committed_steps(self.points, self.steps)

    @property
    def discarded(self) -> list[StepRecord]:
        """Steps that were trained and are not history."""
        kept = {(record.attempt, record.step) for record in self.history}
        return [
            record for records in self.steps.values() for record in records if (record.attempt, record.step) not in kept
        ]


def checkpoint_root(run: RunDirectory, job: TrainingJob) -> Path:
    """Where a job's checkpoints lie on this machine.

    Raises:
        InvalidConfigError: If the location is no local folder.
    """
    location = job.spec.checkpoint.location
    return run.checkpoints if location is None else local_folder(location, field="spec.checkpoint.location")


def read_records(root: Path) -> RunRecords:
    """Read a checkpoint root; a folder that does not exist is a run that has not begun."""
    points = sorted(
        (ResumePoint.model_validate_json(path.read_bytes()) for path in (root / "attempts").glob("*.json")),
        key=lambda point: point.attempt,
    )
    steps = {int(path.stem[1:]): read_steps(path) for path in sorted((root / "steps").glob("a*.jsonl"))}
    results = sorted((root / "evaluation").glob("a*.json"))
    return RunRecords(
        points=points,
        steps=steps,
        checkpoints=_checkpoints(root, points),
        evaluation=json.loads(results[-1].read_bytes()) if results else None,
    )


def last_error(run: RunDirectory, attempt: int) -> str | None:
    """Return the newest error that a rank of the attempt wrote into its log; None when there is none."""
    for path in sorted(run.pods.glob(f"*/rank-*.a{attempt}.log")):
        with path.open(encoding="utf-8", errors="replace") as stream:
            for line in reversed(deque(stream, maxlen=LOG_LINES_MAX)):
                if ERROR_MARK in line:
                    return line.partition(ERROR_MARK)[2].strip()
    return None


def read_steps(path: Path) -> list[StepRecord]:
    """Read an attempt's step records; a last line without its end was torn by a crash and is no record."""
    records = []
    for line in path.read_bytes().splitlines(keepends=True):
        if not line.endswith(b"\n"):
            break
        try:
            records.append(StepRecord.model_validate_json(line))
        except ValidationError:
            break
    return records


def _checkpoints(root: Path, points: Sequence[ResumePoint]) -> list[CheckpointEntry]:
    spans = attempt_spans(points)
    entries = []
    for path in sorted(root.glob("a*-s*")):
        try:
            reference = parse_checkpoint_name(path.name)
        except InvalidConfigError:
            continue
        committed = _is_whole(path)
        entries.append(
            CheckpointEntry(
                name=path.name,
                reference=reference,
                committed=committed,
                history=committed and is_history(reference, spans),
                size_bytes=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
            )
        )
    return entries


def _is_whole(path: Path) -> bool:
    try:
        marker = parse_marker((path / COMMIT_MARKER).read_bytes(), name=path.name)
    except ForeignFormatError:
        # It exists; only this version can't read it, and says so when it is asked to.
        return True
    except (FileNotFoundError, RefusedError):
        return False
    files = {file: path / file for file in marker.files}
    return all(at.is_file() and at.stat().st_size == marker.files[file].size_bytes for file, at in files.items())
