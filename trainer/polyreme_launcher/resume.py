"""Fix the resume point of an attempt: once, by create-if-absent, from the committed, intact checkpoints of history.

Torn and damaged checkpoints are skipped and named. One thing needs a person: if history had checkpoints and none of
them is intact, the attempt is refused, since a fresh start would throw the whole run away.

With the point, the changes of the mixture are fixed that the attempt trains by.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme_api.checkpoint_inventory import State, StoredCheckpoint, Survey, read_point, survey
from polyreme_api.clock import Clock
from polyreme_api.commit_marker import CommitMarker, ForeignFormatError
from polyreme_api.environment import PodEnvironment
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, PolyremeError, RefusedError
from polyreme_api.history import ResumePoint, attempt_key, attempt_spans, claim_key, is_history
from polyreme_api.job import parse_job
from polyreme_api.job.model import Training
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_api.progress import CheckpointRef
from polyreme_api.resume_point import fix_resume_point
from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_datahub.objects import open_store
from polyreme_launcher.run_record import write_run_record
from polyreme_planner.extension import Count, uncounted
from polyreme_planner.mixture import first_mixture, next_mixture, restored_mixture, training_words
from polyreme_planner.rollback import with_rejection

RESUME_TRIES_MAX = 5
RESUME_RETRY_S = 1.0
EntriesOf = Callable[[Mapping[str, Any]], int | None]


class ResumeFixer:
    """Fixes the resume points of one leader's attempts, and retries while the checkpoint root fails.

    Args:
        pod: The leader's pod.
        by: Name of the leader's process.
        objects_url: The datahub's store; None where the job has no data of it.
        clock: Clock.
    """

    def __init__(self, pod: PodEnvironment, *, by: str, objects_url: str | None, clock: Clock) -> None:
        self._pod, self._by, self._objects_url, self._clock = pod, by, objects_url, clock

    async def fix(self, attempt: int, job_json: str | None) -> ResumePoint | None:
        """Fix an attempt's resume point and return it; None if a leader before may have released the attempt.

        Args:
            attempt: The attempt.
            job_json: The job as the leader read it; None if it is of another attempt by now.

        Raises:
            InvalidConfigError: If a checkpoint can't be used by this version.
            RefusedError: If a person has to look at the checkpoint root.
            EnvironmentFailedError: If the checkpoint root stays unavailable.
        """
        spec = None if job_json is None else parse_job(json.loads(job_json)).spec
        entries_of = functools.partial(self._entries_of, spec)
        fix = functools.partial(
            fix_resume, attempt=attempt, by=self._by, spec=spec, entries_of=entries_of, count=self._count(spec)
        )
        last = ""
        for _ in range(RESUME_TRIES_MAX):
            try:
                store, now_s = open_store(self._pod.checkpoint_url), self._clock.now_s()
                return await asyncio.to_thread(fix, store, now_s=now_s)
            except (RefusedError, InvalidConfigError):
                raise
            except (PolyremeError, OSError) as error:
                last = str(error)
                print(f"resume point of attempt {attempt} is not fixed: {last}", file=sys.stderr)
                await self._clock.sleep(RESUME_RETRY_S)
        raise EnvironmentFailedError(f"checkpoint root failed {RESUME_TRIES_MAX} times: {last}")

    async def record(self, job_json: str, plan_json: str) -> None:
        """Write the run's record, unless there is one; what keeps it from being written is printed."""
        write = functools.partial(write_run_record, pod=self._pod, objects_url=self._objects_url)
        await asyncio.to_thread(write, job_json, plan_json, now_s=self._clock.now_s())

    def _count(self, spec: TrainingJobSpec | None) -> Count:
        """Return what counts the steps of epochs; only asked where a run of epochs changes."""

        def count(training: Training) -> Training:
            from polyreme_datahub.loader.epoch_steps import counted_in

            if spec is None or not self._objects_url or training.epochs is None:
                return uncounted(training)
            return counted_in(self._objects_url, spec, job=self._pod.job_uid)(training)

        return count

    def _entries_of(self, spec: TrainingJobSpec | None, state: Mapping[str, Any]) -> int | None:
        """Return how many entries of the schedule the loader knew that saved a state; None if its data is not there."""
        from polyreme_datahub.loader.open import entries_of_state

        if spec is None or not self._objects_url:
            return None
        try:
            return entries_of_state(self._objects_url, spec, state, job=self._pod.job_uid)
        except PolyremeError as error:
            print(f"the schedule of a checkpoint is not known: {error}", file=sys.stderr)
            return None


def fix_resume(
    store: ObjectStore,
    *,
    attempt: int,
    by: str,
    now_s: float,
    spec: TrainingJobSpec | None = None,
    entries_of: EntriesOf = lambda _: None,
    count: Count = uncounted,
) -> ResumePoint | None:
    """Fix the attempt's resume point and return it; None if a process of another name than ``by`` has fixed it.

    Args:
        store: The checkpoint root.
        attempt: The attempt.
        by: Name of the leader's process.
        now_s: The present.
        spec: The job's spec as the leader read it; None for a job whose mixture is not ours.
        entries_of: Returns how many entries of the schedule were known when a loader state was saved, if it can tell:
            asked for a checkpoint of a release whose resume points have no record of the mixture.
        count: Counts the steps of epochs.

    Raises:
        ForeignFormatError: If a checkpoint is of a format that this version does not read.
        RefusedError: If a resume point is damaged, or every checkpoint of history is.
        StoreFailedError: If the store stays unavailable.
    """
    root = _StoreRoot(store)
    if spec is None or "data" not in spec.model_fields_set:
        return fix_resume_point(root, attempt=attempt, by=by, now_s=now_s)
    return fix_resume_point(
        root,
        attempt=attempt,
        by=by,
        now_s=now_s,
        mixture_of=lambda points, chosen: root.mixture(spec, points, chosen, entries_of, count),
    )


class _StoreRoot:
    """A checkpoint root in an object store."""

    def __init__(self, store: ObjectStore) -> None:
        self._store = store
        self._attempt = 0
        self._seen: Survey | None = None

    def claim(self, attempt: int) -> None:
        """Create the attempt's claim, if it is absent."""
        self._attempt = attempt
        with contextlib.suppress(ObjectExistsError):
            self._store.put_if_absent(claim_key(attempt), b"")

    def look(self) -> tuple[Sequence[ResumePoint], Sequence[CheckpointRef]]:
        """Return the fixed resume points, and the committed, intact checkpoints."""
        seen = self._seen = survey(self._store)
        if self._attempt in seen.rebuilt:
            # Its author is unknown, so no process may release the attempt; the next one resumes where it would have.
            raise RefusedError(
                f"resume point is damaged: {attempt_key(self._attempt)} can't be read, or was not written by polyreme"
            )
        for foreign in seen.of(State.FOREIGN):
            raise ForeignFormatError(foreign.why)
        damaged = seen.of(State.DAMAGED)
        for stored in seen.of(State.DAMAGED, State.REJECTED):
            print(f"checkpoint {stored.name} is {stored.state.value} and is not used: {stored.why}", file=sys.stderr)
        if not any(point.attempt == self._attempt for point in seen.points):
            _refuse_fresh_start(seen, damaged)
        return seen.points, seen.committed

    def put_if_absent(self, point: ResumePoint) -> ResumePoint:
        """Create the point of its attempt, and return the one that is stored then."""
        try:
            self._store.put_if_absent(attempt_key(point.attempt), point.model_dump_json(by_alias=True).encode())
        except ObjectExistsError:
            return read_point(self._store, point.attempt)
        return point

    def mixture(
        self,
        spec: TrainingJobSpec,
        points: Sequence[ResumePoint],
        chosen: CheckpointRef | None,
        entries_of: EntriesOf,
        count: Count,
    ) -> MixtureRecord:
        """Return the changes of the mixture of an attempt: those of the newest one before it, and what came since."""
        step = 0 if chosen is None else chosen.step
        for point in sorted(points, key=lambda point: point.attempt, reverse=True):
            if (known := point.mixture or self._saved_mixture(spec, point.attempt)) is not None:
                for words in training_words(spec, known, after_step=step, count=count):
                    print(words, file=sys.stderr)
                return next_mixture(spec, self._with_rejections(spec, known), after_step=step, count=count)
        # Points of releases before there were records, if any.
        marker = self._marker(lambda reference: reference == chosen)
        entries = None if marker is None or not spec.data.schedule else entries_of(marker.loader)
        return self._with_rejections(spec, first_mixture(spec, entries=entries, resume_step=step))

    def _with_rejections(self, spec: TrainingJobSpec, known: MixtureRecord) -> MixtureRecord:
        """Return a mixture that also skips the data that earlier attempts rejected after a spike."""
        for rejection in () if self._seen is None else self._seen.rejections:
            if rejection.attempt < self._attempt:
                known = with_rejection(spec, known, rejection)
        return known

    def _marker(self, wanted: Callable[[CheckpointRef], bool]) -> CommitMarker | None:
        """Return the marker of the newest of some checkpoints that are whole."""
        stored = () if self._seen is None else self._seen.of(State.WHOLE)
        found = [of for of in stored if wanted(of.reference)]
        return max(found, key=lambda of: of.reference.step).marker if found else None

    def _saved_mixture(self, spec: TrainingJobSpec, attempt: int) -> MixtureRecord | None:
        """Return the changes of an attempt whose point was lost, by its newest checkpoint."""
        marker = self._marker(lambda reference: reference.attempt == attempt)
        if marker is None or "mixture" not in marker.loader:
            return None
        return restored_mixture(spec, marker.loader["mixture"])


def _refuse_fresh_start(seen: Survey, damaged: Sequence[StoredCheckpoint]) -> None:
    """Refuse an attempt that would begin at step 0 though the run had got further.

    Raises:
        RefusedError: Naming what is damaged.
    """
    spans = attempt_spans(seen.points)
    lost = [stored for stored in damaged if is_history(stored.reference, spans)]
    if lost and not any(is_history(reference, spans) for reference in seen.committed):
        named = "; ".join(f"{stored.name}: {stored.why}" for stored in lost)
        raise RefusedError(
            f"no checkpoint of the run is intact: {named}; restore the files, or start another run",
            field="spec.checkpoint.location",
        )
