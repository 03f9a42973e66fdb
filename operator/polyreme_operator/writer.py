"""Applies the decisions about jobs, and writes the scheduler's intents and the statuses of queues and topology."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from polyreme_api.fields import StatusPart
from polyreme_api.job import TrainingJobStatus
from polyreme_cluster.port import ConflictError, InvalidObjectError, NotFoundError, ObjectRef, PortError
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.job_objects import JobObjects, created_kind
from polyreme_operator.types.actions import (
    Action,
    EmitEvent,
    ObjectAction,
    WriteIntents,
    WriteQueueStatus,
    WriteStatus,
)
from polyreme_operator.types.intents import INTENTS_KEY, render_intents
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.snapshot import ENDING_KINDS

_SHOWN = ("arrival", *TrainingJobStatus.model_computed_fields)
"""Fields included in every patch: the computed ones, for readers, and the arrival, which the cache knows before it is
written."""


@dataclasses.dataclass(slots=True)
class _Answers:
    """The API server's answers to the writes of one pass, by kind of object."""

    accepted: set[str] = dataclasses.field(default_factory=set)
    refused: dict[str, PortError] = dataclasses.field(default_factory=dict)
    """The first refusal of each kind without which the attempt can't continue."""
    failed: list[PortError] = dataclasses.field(default_factory=list)
    """All other errors."""

    def fail(self, kind: str, error: PortError) -> None:
        if isinstance(error, InvalidObjectError) and kind in ENDING_KINDS:
            self.refused.setdefault(kind, error)
        else:
            self.failed.append(error)


class Writer:
    """Writes decisions.

    Args:
        cluster: The cluster.
        objects: Creates, binds and deletes the objects of jobs.
        writes_max: Objects of one pass, or statuses of one cycle, written concurrently.
        emit: Emits an event.
        observer: Receives the statuses that were accepted.
    """

    def __init__(
        self,
        cluster: CachedCluster,
        objects: JobObjects,
        writes_max: int,
        *,
        emit: Callable[[EmitEvent], None],
        observer: Observer,
    ) -> None:
        self._cluster, self._cache, self._objects, self._writes_max = cluster, cluster.cache, objects, writes_max
        self._emit, self._observer = emit, observer
        self._writes = asyncio.Semaphore(writes_max)
        self._batch_writes = asyncio.Semaphore(writes_max)

    async def apply(self, actions: Sequence[Action], uid: str, *, wanted: Callable[[], bool] = lambda: False) -> bool:
        """Apply one pass: first the status, on which everything else depends; then objects concurrently; then events.

        Creating the objects of a large gang takes long. It stops early when the job changes or another task waits for
        it; the next pass decides about the remaining ones.

        Args:
            actions: The pass.
            uid: The job's UID.
            wanted: Tells whether another task waits for the pass to end.

        Returns:
            Whether everything was tried.

        Raises:
            PortError: The first one of a write; all concurrent writes were tried.
        """
        for action in actions:
            if isinstance(action, WriteStatus):
                await self._write_status(action)
        objects = [action for action in actions if isinstance(action, ObjectAction)]
        if not objects:
            self._emit_all(actions)
            return True
        job, left = self._cache.job(uid), iter(objects)
        answers = _Answers()

        async def work() -> None:
            while (
                not (answers.refused or wanted())
                and self._cache.job(uid) is job
                and (action := next(left, None)) is not None
            ):
                try:
                    async with self._writes:
                        await self._objects.apply(action)
                    answers.accepted.add(created_kind(action))
                except PortError as error:
                    answers.fail(created_kind(action), error)

        workers = min(len(objects), self._writes_max)
        results = await asyncio.gather(*(work() for _ in range(workers)), return_exceptions=True)
        self._emit_all(actions)
        for kind, error in answers.refused.items():
            self._cluster.note_refusal(uid, kind, str(error))
        for kind in (answers.accepted & ENDING_KINDS) - answers.refused.keys():
            self._cache.notes.refusals.accept(uid, kind)
        for result in (*results, *answers.failed, *answers.refused.values()):
            if isinstance(result, BaseException):
                raise result
        return next(left, None) is None

    def _emit_all(self, actions: Sequence[Action]) -> None:
        for action in actions:
            if isinstance(action, EmitEvent):
                self._emit(action)

    async def write_intents(self, write: WriteIntents, ref: ObjectRef) -> None:
        """Write a batch of intents by compare-and-swap.

        Raises:
            PortError: Nothing of the batch may be applied then.
        """
        data, version = {INTENTS_KEY: render_intents(write.entries)}, write.resource_version
        try:
            if version is None:
                # Without entries, which readers take as unknown ones: a create may land late, after someone has deleted
                # the object, and must not bring back a batch of then.
                metadata = {"name": ref.name, "namespace": ref.namespace}
                created = await self._cluster.port.create(
                    {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata}
                )
                version = created["metadata"]["resourceVersion"]
            result = await self._cluster.port.patch(ref, {"data": data}, resource_version=version)
        except PortError:
            await self._cluster.refresh(ref)
            raise
        # Our own write needs no reaction.
        self._cache.put(result, now_s=self._cluster.clock.now_s())

    async def write_queue_statuses(self, writes: Sequence[WriteQueueStatus]) -> None:
        """Write statuses of queues and topology one after another, so that they never crowd out other writes.

        Raises:
            PortError: The first that a write met; the others were tried too.
        """
        failed: list[PortError] = []
        for write in writes:
            self._emit_all(write.events)
            try:
                await self._write_queue_status(write)
            except PortError as error:
                failed.append(error)
        if failed:
            raise failed[0]

    async def _write_queue_status(self, write: WriteQueueStatus) -> None:
        """Write one status; a later run repeats it after a conflict."""
        try:
            self._cluster.take(
                await self._cluster.patch_status(write.ref, dict(write.status), resource_version=write.resource_version)
            )
        except (ConflictError, NotFoundError):
            await self._cluster.refresh(write.ref)

    async def side_by_side(self, writes: Sequence[Coroutine[Any, Any, None]]) -> None:
        """Run many writes with limited concurrency.

        Raises:
            PortError: The first that a write met; the others were tried too.
        """
        try:
            results = await asyncio.gather(*(self._gated(write) for write in writes), return_exceptions=True)
        finally:
            # On cancellation, close the writes that have not started.
            for write in writes:
                write.close()
        for result in results:
            if isinstance(result, BaseException):
                raise result

    async def _gated(self, write: Coroutine[Any, Any, None]) -> None:
        async with self._batch_writes:
            await write

    async def _write_status(self, action: WriteStatus) -> None:
        status = status_patch(action.before, action.after)
        try:
            result = await self._cluster.patch_status(action.ref, status, resource_version=action.resource_version)
        except PortError:
            await self._cluster.refresh(action.ref)
            raise
        job = self._cache.job(action.uid)
        if job is not None:
            before = dataclasses.replace(job, status=action.before)
            self._observer.on_status_written(before, action.after, now_s=self._cluster.clock.now_s())
        self._cluster.take(result)


def status_patch(before: TrainingJobStatus, after: TrainingJobStatus) -> dict[str, Any]:
    """Return the merge patch from one status to another: the top-level fields that differ, whole; None removes."""
    fields = TrainingJobStatus.model_fields
    changed = [name for name in fields if getattr(before, name) != getattr(after, name)]
    if not changed:
        return {}
    shown = after.model_dump(mode="json", by_alias=True, exclude_none=True, include={*changed, *_SHOWN})
    patch: dict[str, Any] = {alias: shown.get(alias) for alias in (fields[name].alias or name for name in changed)}
    for name in changed:
        if isinstance(part := getattr(after, name), StatusPart):
            _remove_absent(patch[fields[name].alias or name], part)
    return patch | {name: shown[name] for name in _SHOWN}


def _remove_absent(patch: dict[str, Any], part: StatusPart) -> None:
    """Add what a part lacks as None: a merge patch keeps what it does not name."""
    for name, field in type(part).model_fields.items():
        value, alias = getattr(part, name), field.alias or name
        if value is None:
            patch[alias] = None
        elif isinstance(value, StatusPart):
            _remove_absent(patch[alias], value)
