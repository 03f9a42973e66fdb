"""Actions of decisions: a closed union; every write has a precondition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from polyreme_api.job import TrainingJobStatus
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.types.intents import Intent


class PodPattern(Protocol):
    """Template of the pods of one gang."""

    def manifest(self, *, index: int, node: str) -> Manifest:
        """Return the pod for one place."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """Create a worker pod, with its name as precondition, and bind it if the operator binds pods."""

    pattern: PodPattern
    index: int
    node: str
    binds: bool = False
    """Whether the operator binds it, with the UID that its creation returned."""

    @property
    def manifest(self) -> Manifest:
        """The pod. It is built on access, so that a gang of 15,000 pods is never in memory at once."""
        return self.pattern.manifest(index=self.index, node=self.node)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Bind a pod to its node, if it still has this UID."""

    ref: ObjectRef
    uid: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateChild:
    """Create an object that exists once per job: Service, Lease, its launcher's Role and RoleBinding."""

    manifest: Manifest
    then: CreateChild | None = None
    """An object that refers to the first, and can be created only after it."""
    key: str = ""
    """What it is known by among the job's objects; its kind, unless there are several of that."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateSecret:
    """Create the job's Secret. The writer derives the key in it, so that no decision holds one."""

    manifest: Manifest
    key_id: str
    """Name of the installation's key from which it is derived; empty: the one for new gangs."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateAccount:
    """Create the leader's ServiceAccount, which pulls images with the Secrets of the namespace's own account."""

    manifest: Manifest


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod, if it still has this UID."""

    ref: ObjectRef
    uid: str
    grace_s: int | None = None
    """0 only if the node is known to be lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete a finished job after its TTL, if it has not changed."""

    ref: ObjectRef
    uid: str
    resource_version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """Replace a job's status, if the job has not changed."""

    ref: ObjectRef
    uid: str
    resource_version: str
    before: TrainingJobStatus
    after: TrainingJobStatus
    informational: bool = False
    """Whether no controller acts on it, so that it may be delayed and replaced by a newer one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """Tell people. Best effort: an event may be lost, the status is the record."""

    ref: ObjectRef
    uid: str
    reason: str
    message: str
    warning: bool = False
    key: str = ""
    """Part of the event's name, so that a repeated event is not created twice."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteQueueStatus:
    """Replace fields of the status of a queue or topology, if it has not changed."""

    ref: ObjectRef
    resource_version: str
    status: Mapping[str, Any]
    """Changed fields, whole; None removes a field."""
    events: tuple[EmitEvent, ...] = ()
    """To emit after the write, about what it changes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteIntents:
    """Replace the batch of intents, if it has not changed; without a version the object is created."""

    resource_version: str | None
    entries: tuple[Intent, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """Read the Lease now: the next decision depends on whether it says more than its watch has."""

    ref: ObjectRef


ObjectAction: TypeAlias = (
    CreatePod | Bind | CreateChild | CreateSecret | CreateAccount | DeletePod | DeleteJob | ReadLease
)
"""An action on one of a job's objects, or on the job as a whole."""
Action: TypeAlias = ObjectAction | WriteStatus | EmitEvent


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and when to look again if nothing happens before."""

    actions: tuple[Action, ...] = ()
    wake_at_s: float | None = None
    reschedule: bool = False
    """Whether the cluster's scheduler must act: another place is not one job's to take."""
