"""Creates, binds and deletes the objects of jobs."""

from __future__ import annotations

import base64

from polyreme_api import labels
from polyreme_api.ownership import job_owner
from polyreme_cluster.port import AlreadyExistsError, InvalidObjectError, Manifest, NotFoundError, ObjectRef, PortError
from polyreme_operator.cache.kinds import WATCHED_KINDS
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.types.actions import (
    Bind,
    CreateAccount,
    CreateChild,
    CreatePod,
    CreateSecret,
    DeleteJob,
    DeletePod,
    ObjectAction,
    ReadLease,
)
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.job_keys import JobKeys


class JobObjects:
    """The pods, Leases and other objects of jobs.

    Args:
        cluster: The cluster.
        keys: Derive the secrets of jobs.
    """

    def __init__(self, cluster: CachedCluster, keys: JobKeys) -> None:
        self._cluster, self._cache, self._keys = cluster, cluster.cache, keys

    async def apply(self, action: ObjectAction) -> None:
        """Apply one action.

        Raises:
            PortError: If the API server does not accept it.
        """
        match action:
            case CreatePod():
                await self._create_pod(action)
            case Bind(ref=ref, uid=uid, node=node):
                await self._cluster.bind(ref, uid=uid, node=node)
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
                await self._cluster.delete(ref, uid=uid, grace_s=grace_s)
            case DeleteJob(ref=ref, uid=uid, resource_version=version):
                await self._cluster.delete(ref, uid=uid, resource_version=version)
            case ReadLease(ref=ref):
                await self._cluster.refresh(ref)

    async def _create_pod(self, action: CreatePod) -> None:
        created = await self._create(action.manifest)
        if created is not None and action.binds:
            # If the operator is killed in between, the next pass binds the pod.
            await self._cluster.bind(ObjectRef.of(created), uid=created["metadata"]["uid"], node=action.node)

    async def _create(self, manifest: Manifest) -> Manifest | None:
        """Create an object; None where the job has one of its name.

        Raises:
            InvalidObjectError: Also if an object of another owner has the name.
        """
        try:
            created = await self._cluster.port.create(manifest)
        except PortError as error:
            # The operator has no permission to read kinds that it does not watch, such as Secrets.
            ref = ObjectRef.of(manifest)
            found = await self._cluster.refresh(ref) if manifest["kind"] in WATCHED_KINDS else None
            if not isinstance(error, AlreadyExistsError):
                raise
            if found is not None and not self._is_own(manifest, found):
                words = f"{ref} exists and is not controlled by the job, which needs this name; delete or rename it"
                raise InvalidObjectError(words) from error
            return None
        self._cluster.take(created)
        return created

    def _is_own(self, wanted: Manifest, found: Manifest) -> bool:
        """Tell whether an object of a wanted name belongs to the job that wants it."""
        if job_owner(found["metadata"]) == job_owner(wanted["metadata"]):
            return True
        job = self._cache.job(_job_uid(wanted)) if wanted["kind"] == "Lease" else None
        return job is not None and self._cache.leases.is_of(job, found["metadata"])

    async def _create_child(self, manifest: Manifest, key: str = "") -> None:
        """Create an object that exists once per job, known by its kind or its key."""
        uid, kind = _job_uid(manifest), manifest["kind"]
        try:
            await self._create(manifest)
        except InvalidObjectError as error:
            if kind in WATCHED_KINDS:
                raise
            if not self._cache.notes.children.was_confirmed(uid, key or kind):
                self._cluster.note_refusal(uid, key or kind, str(error))
                return
            # It existed a few minutes ago, and a quota is checked first. It is tried again later.
        except PortError:
            # Whether it was created is unknown.
            self._cache.notes.refusals.may_exist(uid, key or kind)
            raise
        self._cache.notes.refusals.accept(uid, key or kind)
        self._cache.notes.children.confirm(uid, key or kind, now_s=self._cluster.clock.now_s())
        self._cluster.note(Changes(jobs={uid}))

    async def _create_account(self, manifest: Manifest) -> None:
        """Create a ServiceAccount; its pods pull images as those of the namespace's own account do."""
        ref = ObjectRef(kind="ServiceAccount", namespace=manifest["metadata"]["namespace"], name="default")
        try:
            pulls = (await self._cluster.port.get(ref)).get("imagePullSecrets") or []
        except NotFoundError:
            pulls = []
        await self._create_child({**manifest, "imagePullSecrets": pulls})

    async def _create_next(self, action: CreateChild, first: str) -> None:
        """Create an object that refers to another one, which may exist although its creation was refused."""
        uid = _job_uid(action.manifest)
        try:
            await self.apply(action)
        except NotFoundError:
            if self._cache.notes.children.was_confirmed(uid, first):
                raise


def created_kind(action: ObjectAction) -> str:
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
