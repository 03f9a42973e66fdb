"""The steps of a run that no later attempt repeats, as points under the field's usual names."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from polyreme.run_files.identity import read_identity
from polyreme.run_files.paths import RunDirectory
from polyreme.run_files.records import checkpoint_url, read_evaluation, step_parts
from polyreme.tracking.port import ATTEMPT, Parameter, Point, TrackedRun
from polyreme_api.checkpoint_inventory import survey
from polyreme_api.differences import leaves
from polyreme_api.history import attempt_spans, committed_steps, is_history
from polyreme_api.job import TrainingJob
from polyreme_api.progress import ALL_SETS, StepRecord
from polyreme_api.redaction import hide
from polyreme_api.step_columns import parse_steps
from polyreme_api.store import ObjectStore
from polyreme_datahub.objects import open_store
from polyreme_launcher.urls import checkpoint_folder

_NOT_IN_NAMES = re.compile(r"[^\w\-. /]")
LEFT_OUT = "workers.template"
"""Part of the spec that is no hyper-parameter, and whose environment may hold secrets."""


@dataclasses.dataclass(slots=True)
class _Part:
    """What was read of one file of step records."""

    read_bytes: int = 0
    records: list[StepRecord] = dataclasses.field(default_factory=list)


class SettledSteps:
    """Follows a checkpoint root: steps that a checkpoint holds, or all of them once the run has finished.

    A step after the newest checkpoint may be trained again by a later attempt, so it is not settled.
    """

    def __init__(self, run: RunDirectory, job: TrainingJob) -> None:
        self._url = checkpoint_url(run, job)
        self._parts: dict[tuple[int, str], _Part] = {}
        self._forgotten = 0
        self.unsettled = 0
        """Recorded steps of history that were left out by the last ``read``."""
        self.attempts = 0
        """Attempts that were seen by the last ``read``."""

    def read(self, *, finished: bool) -> list[Point]:
        """Return the settled steps, without those that were forgotten, with the results at the end of a finished run.

        Raises:
            RefusedError: If a resume point is damaged.
            StoreFailedError: If the store stays away.
        """
        folder = checkpoint_folder(self._url)
        if folder is not None and not folder.is_dir():
            return []
        store = open_store(self._url)
        # The records are read after the checkpoints, so they hold each step that a checkpoint does.
        seen = survey(store)
        spans = attempt_spans(seen.points)
        held = max((at.step for at in seen.committed if is_history(at, spans)), default=0)
        self._read_parts(store)
        by_attempt: dict[int, list[StepRecord]] = {}
        for (attempt, _), part in sorted(self._parts.items()):
            by_attempt.setdefault(attempt, []).extend(part.records)
        history = committed_steps(seen.points, by_attempt)
        settled = [record for record in history if finished or record.step <= held]
        self.unsettled, self.attempts = len(history) - len(settled), len(seen.points)
        points = [point_of(record) for record in settled]
        if finished and (evaluation := read_evaluation(store)) is not None:
            points += [_end_point(evaluation, record) for record in settled if record.step == evaluation["step"]]
        return points

    def forget(self, step: int) -> None:
        """Drop the records before a step, which the tracker holds."""
        self._forgotten = max(self._forgotten, step)
        for part in self._parts.values():
            part.records = [record for record in part.records if record.step >= self._forgotten]

    def _read_parts(self, store: ObjectStore) -> None:
        for attempt, info in step_parts(store):
            part = self._parts.setdefault((attempt, info.key), _Part())
            if info.size_bytes > part.read_bytes:
                start = part.read_bytes
                data = store.get_range(info.key, start=start, length=info.size_bytes - start)
                whole = data[: data.rfind(b"\n") + 1]
                part.records += [record for record in parse_steps(whole) if record.step >= self._forgotten]
                part.read_bytes += len(whole)


def point_of(record: StepRecord) -> Point:
    """Name the values of a step."""
    values: dict[str, float] = {
        "train/loss": record.loss,
        "train/lr": record.learning_rate,
        "train/grad_norm": record.gradient_norm,
        "train/tokens": record.tokens,
        "train/step_s": record.step_s,
        "train/data_wait_s": record.data_wait_s,
        ATTEMPT: record.attempt,
    }
    if record.update_norm is not None:
        values["train/update_norm"] = record.update_norm
    if record.expert_load_max:
        values["router/load_max"] = record.expert_load_max
        values["router/entropy"] = record.router_entropy
        values["router/rows_dropped"] = record.rows_dropped
    values |= {f"objective/{_plain(measure)}": value for measure, value in record.objective.items()}
    values |= _by_set("eval/loss", record.held_out)
    values |= _by_set("eval/pair_accuracy", record.held_out_pairs)
    return Point(step=record.step, attempt=record.attempt, at_s=record.ended_at_s, values=values)


def tracked_run(run: RunDirectory, job: TrainingJob, *, state: str, attempts: int) -> TrackedRun:
    """Collect what a tracker is given of a run."""
    identity = read_identity(run) or {}
    created_s = float(identity.get("createdAt") or 0.0)
    return TrackedRun(
        namespace=run.namespace,
        name=run.name,
        uid=str(identity.get("uid") or f"{run.namespace}.{run.name}.{created_s:.0f}"),
        created_s=created_s,
        parameters=dict(_parameters(leaves("spec", job.spec.model_dump(mode="json", by_alias=True)))),
        state=state,
        tags={"state": state, "attempts": str(attempts), "version": importlib.metadata.version("polyreme")},
    )


def _parameters(fields: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Parameter]]:
    for field, value in fields:
        name = field.removeprefix("spec.")
        if value is None or value in ([], {}) or name.startswith(LEFT_OUT):
            continue
        yield name, hide(value) if isinstance(value, str) else value


def _by_set(name: str, values: Mapping[str, float]) -> dict[str, float]:
    """Name the values of held-out sets; that of all sets has the plain name."""
    return {name if held_out == ALL_SETS else f"{name}/{_plain(held_out)}": of for held_out, of in values.items()}


def _plain(name: str) -> str:
    """Keep the characters of a name that every tracker takes."""
    return _NOT_IN_NAMES.sub("_", name)


def _end_point(evaluation: Mapping[str, Any], last: StepRecord) -> Point:
    """Name the shares of exactly right answers at the end of a run."""
    sets: dict[str, list[bool]] = {}
    for page in evaluation.get("pages", ()):
        sets.setdefault(page["set"], []).append(bool(page["match"]))
    shares = {name: sum(right) / len(right) for name, right in sets.items()}
    shares[ALL_SETS] = float(evaluation["exactMatchRatio"])
    return Point(step=last.step, attempt=last.attempt, at_s=last.ended_at_s, values=_by_set("eval/exact_match", shares))
