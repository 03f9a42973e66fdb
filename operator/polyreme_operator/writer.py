"""Applies actions to the cluster, and takes every answer into the cache at once."""

from __future__ import annotations

import asyncio
import base64
import dataclasses
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.job import TrainingJobStatus
from polyreme_api.ownership import job_owner
from polyreme_cluster.port import (
    STATUS_SUBRESOURCE,
    AlreadyExistsError,
    ClusterPort,
    ConflictError,
    InvalidObjectError,
    Manifest,
    NotFoundError,
    ObjectRef,
    PortError,
)
from polyreme_operator.cache.kinds import WATCHED_KINDS
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import (
    Action,
    Bind,
    CreateAccount,
    CreateChild,
    CreatePod,
    CreateSecret,
    DeleteJob,
    DeletePod,
    EmitEvent,
    ReadLease,
    WriteIntents,
    WriteQueueStatus,
    WriteStatus,
)
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.intents import INTENTS_KEY, render_intents
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.observer import Observer
from polyreme_operator.types.snapshot import ENDING_KINDS

_NO_OBJECTS = (WriteStatus, EmitEvent)
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
    """Writes decisions, and refreshes the cache where a write conflicts."""

    def __init__(
        self,
        port: ClusterPort,
        clock: Clock,
        cache: ClusterCache,
        settings: Settings,
        *,
        keys: JobKeys,
        note: Callable[[Changes], None],
        emit: Callable[[EmitEvent], None],
        observer: Observer,
    ) -> None:
        self._port, self._clock, self._cache, self._settings = port, clock, cache, settings
        self._keys, self._note, self._emit, self._observer = keys, note, emit, observer
        self._writes = asyncio.Semaphore(settings.writes_max)
        self._batch_writes = asyncio.Semaphore(settings.writes_max)

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
                await self._one(action)
        objects = [action for action in actions if not isinstance(action, _NO_OBJECTS)]
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
                        await self._one(action)
                    answers.accepted.add(_kind_of(action))
                except PortError as error:
                    answers.fail(_kind_of(action), error)

        workers = min(len(objects), self._settings.writes_max)
        results = await asyncio.gather(*(work() for _ in range(workers)), return_exceptions=True)
        self._emit_all(actions)
        for kind, error in answers.refused.items():
            self._note(self._cache.note_refusal(uid, kind, str(error), now_s=self._clock.now_s()))
        for kind in (answers.accepted & ENDING_KINDS) - answers.refused.keys():
            self._cache.refusals.accept(uid, kind)
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
                created = await self._port.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata})
                version = created["metadata"]["resourceVersion"]
            result = await self._port.patch(ref, {"data": data}, resource_version=version)
        except PortError:
            await self.refresh(ref)
            raise
        # Our own write needs no reaction.
        self._cache.put(result, now_s=self._clock.now_s())

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
        patch = {"status": dict(write.status)}
        try:
            self._take(
                await self._port.patch(
                    write.ref, patch, resource_version=write.resource_version, subresource=STATUS_SUBRESOURCE
                )
            )
        except (ConflictError, NotFoundError):
            await self.refresh(write.ref)

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

    async def refresh(self, ref: ObjectRef) -> Manifest | None:
        """Read one object into the cache; return it, or None if it does not exist."""
        try:
            found = await self._port.get(ref)
        except NotFoundError:
            self._note(self._cache.remove(ref, version=None))
            return None
        self._note(self._cache.put(found, now_s=self._clock.now_s(), reread=True))
        return found

    async def _one(self, action: Action) -> None:
        match action:
            case WriteStatus():
                await self._write_status(action)
            case CreatePod():
                await self._create_pod(action)
            case Bind(ref=ref, uid=uid, node=node):
                await self._bind(ref, uid=uid, node=node)
            case CreateChild(manifest=manifest, then=then, key=key):
                await self._create_child(manifest, key)
                if then is not None:
                    await self._create_next(then, manifest["kind"])
            case CreateSecret(manifest=manifest, key_id=key_id):
                shared = self._keys.secret(_job_uid(manifest), key_id)
                data = {labels.SECRET_KEY: base64.b64encode(shared).decode()}
                await self._create_child({**manifest, "data": data})
            case CreateAccount(manifest=manifest):
                await self._create_account(manifest)
            case DeletePod(ref=ref, uid=uid, grace_s=grace_s):
                await self._delete(ref, uid=uid, grace_s=grace_s)
            case DeleteJob(ref=ref, uid=uid, resource_version=version):
                await self._delete(ref, uid=uid, resource_version=version)
            case ReadLease(ref=ref):
                await self.refresh(ref)
            case WriteIntents() | EmitEvent():
                raise AssertionError("intents are the scheduler's to write, events the announcer's")

    async def _write_status(self, action: WriteStatus) -> None:
        patch = {"status": status_patch(action.before, action.after)}
        try:
            result = await self._port.patch(
                action.ref, patch, resource_version=action.resource_version, subresource=STATUS_SUBRESOURCE
            )
        except PortError:
            await self.refresh(action.ref)
            raise
        job = self._cache.job(action.uid)
        if job is not None:
            before = dataclasses.replace(job, status=action.before)
            self._observer.on_status_written(before, action.after, now_s=self._clock.now_s())
        self._take(result)

    async def _create_pod(self, action: CreatePod) -> None:
        created = await self._create(action.manifest)
        if created is not None and action.binds:
            # If the operator is killed in between, the next pass binds the pod.
            await self._bind(ObjectRef.of(created), uid=created["metadata"]["uid"], node=action.node)

    async def _create(self, manifest: Manifest) -> Manifest | None:
        """Create an object; None where the job has one of its name.

        Raises:
            InvalidObjectError: Also if an object of another owner has the name.
        """
        try:
            created = await self._port.create(manifest)
        except PortError as error:
            # The operator has no permission to read kinds that it does not watch, such as Secrets.
            ref = ObjectRef.of(manifest)
            found = await self.refresh(ref) if manifest["kind"] in WATCHED_KINDS else None
            if not isinstance(error, AlreadyExistsError):
                raise
            if found is not None and not self._is_own(manifest, found):
                words = f"{ref} exists and is not controlled by the job, which needs this name; delete or rename it"
                raise InvalidObjectError(words) from error
            return None
        self._take(created)
        return created

    def _is_own(self, wanted: Manifest, found: Manifest) -> bool:
        """Tell whether an object of a wanted name belongs to the job that wants it."""
        if job_owner(found["metadata"]) == job_owner(wanted["metadata"]):
            return True
        job = self._cache.job(_job_uid(wanted)) if wanted["kind"] == "Lease" else None
        return job is not None and self._cache.leases.is_of(job, found["metadata"])

    async def _create_child(self, manifest: Manifest, key: str = "") -> None:
        """Create an object of which a job has one, known by its kind or its key."""
        uid, kind = _job_uid(manifest), manifest["kind"]
        try:
            await self._create(manifest)
        except InvalidObjectError as error:
            if kind in WATCHED_KINDS:
                raise
            if not self._cache.children.was_confirmed(uid, key or kind):
                self._note(self._cache.note_refusal(uid, key or kind, str(error), now_s=self._clock.now_s()))
                return
            # It existed a few minutes ago, and a quota is checked first. It is tried again later.
        except PortError:
            # Whether it was created is unknown.
            self._cache.refusals.may_exist(uid, key or kind)
            raise
        self._cache.refusals.accept(uid, key or kind)
        self._cache.children.confirm(uid, key or kind, now_s=self._clock.now_s())
        self._note(Changes(jobs={uid}))

    async def _create_account(self, manifest: Manifest) -> None:
        """Create a ServiceAccount; its pods pull images as those of the namespace's own account do."""
        ref = ObjectRef(kind="ServiceAccount", namespace=manifest["metadata"]["namespace"], name="default")
        try:
            pulls = (await self._port.get(ref)).get("imagePullSecrets") or []
        except NotFoundError:
            pulls = []
        await self._create_child({**manifest, "imagePullSecrets": pulls})

    async def _create_next(self, action: CreateChild, first: str) -> None:
        """Create an object that refers to another one, which may exist although its creation was refused."""
        uid = _job_uid(action.manifest)
        try:
            await self._one(action)
        except NotFoundError:
            if self._cache.children.was_confirmed(uid, first):
                raise

    async def _bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        try:
            await self._port.bind(ref, uid=uid, node=node)
            self._cache.note_bound(ref, uid=uid, node=node)
        except NotFoundError:
            await self.refresh(ref)
        except ConflictError:
            # Another object or version exists: the next pass decides again.
            await self.refresh(ref)
            raise

    async def _delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_s: int | None = None
    ) -> None:
        try:
            await self._port.delete(ref, uid=uid, resource_version=resource_version, grace_period_s=grace_s)
        except NotFoundError:
            await self.refresh(ref)
        except ConflictError:
            # Another object or version exists: the next pass decides again.
            await self.refresh(ref)
            raise

    def _take(self, manifest: Manifest) -> None:
        self._note(self._cache.put(manifest, now_s=self._clock.now_s()))


def _kind_of(action: Action) -> str:
    """Return the kind of object that an action creates or binds; empty for any other action."""
    match action:
        case CreatePod() | Bind():
            return "Pod"
        case CreateChild(manifest=manifest):
            return str(manifest["kind"])
        case _:
            return ""


def _job_uid(manifest: Manifest) -> str:
    uid: str = manifest["metadata"]["labels"][labels.LABEL_JOB_UID]
    return uid


def status_patch(before: TrainingJobStatus, after: TrainingJobStatus) -> dict[str, Any]:
    """Return the merge patch from one status to another: the top-level fields that differ, whole; None removes."""
    fields = TrainingJobStatus.model_fields
    changed = [name for name in fields if getattr(before, name) != getattr(after, name)]
    if not changed:
        return {}
    shown = after.model_dump(mode="json", by_alias=True, exclude_none=True, include={*changed, *_SHOWN})
    aliases = [fields[name].alias or name for name in changed]
    return {alias: shown.get(alias) for alias in aliases} | {name: shown[name] for name in _SHOWN}
