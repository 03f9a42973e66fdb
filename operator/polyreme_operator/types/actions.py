"""What a decision may ask for: a closed union, every write with its precondition."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol, TypeAlias

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.port import Manifest, ObjectRef
from polyreme_operator.types.intents import Intent


class PodPattern(Protocol):
    """What the pods of one gang have in common."""

    def manifest(self, *, index: int, node: str) -> Manifest:
        """Return the pod for one place."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreatePod:
    """Create a worker pod; its name is its precondition. One that waits for the operator then gets its node."""

    pattern: PodPattern
    index: int
    node: str
    binds: bool = False
    """Whether it waits for the operator: it is bound as the pod that its creation answered with."""

    @property
    def manifest(self) -> Manifest:
        """The pod. Made when it is asked for: a gang of 15,000 is never in memory at once."""
        return self.pattern.manifest(index=self.index, node=self.node)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Bind:
    """Give a pod that waits for the operator its node, if it still is this pod."""

    ref: ObjectRef
    uid: str
    node: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateChild:
    """Create an object that a job has one of: Service, Lease, its launcher's Role and RoleBinding."""

    manifest: Manifest
    then: CreateChild | None = None
    """One that names the first, and is refused where that is not there yet."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CreateSecret:
    """Create the job's Secret. The shell draws the random bytes of each key: decisions know no randomness."""

    manifest: Manifest
    keys: tuple[str, ...]
    renews: bool = False
    """Whether pods run that have read an earlier one, if this creates it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeletePod:
    """Delete a pod, if it still is this one."""

    ref: ObjectRef
    uid: str
    grace_s: int | None = None
    """0 only where the node is known to be lost."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DeleteJob:
    """Delete a finished job whose time is over, if nobody has touched it since."""

    ref: ObjectRef
    uid: str
    resource_version: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteStatus:
    """Replace a job's status, if the job is as it was seen."""

    ref: ObjectRef
    uid: str
    resource_version: str
    before: TrainingJobStatus
    after: TrainingJobStatus
    informational: bool = False
    """Whether it only tells what is seen: nothing rests on it, so it may wait for something newer."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteQueueStatus:
    """Replace fields of the status of a queue or topology, if it is as it was seen."""

    ref: ObjectRef
    resource_version: str
    status: Mapping[str, Any]
    """Fields that differ, whole; None removes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WriteIntents:
    """Replace the batch of intents, if it is as it was seen; None creates the object."""

    resource_version: str | None
    entries: tuple[Intent, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ReadLease:
    """Read the Lease now: the next decision hangs on whether it says more than its watch has."""

    ref: ObjectRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EmitEvent:
    """Tell people. Best effort: an event may be lost, the status is the record."""

    ref: ObjectRef
    uid: str
    reason: str
    message: str
    warning: bool = False
    key: str = ""
    """Makes the event's name, so that telling it twice tells it once."""


Action: TypeAlias = (
    CreatePod
    | Bind
    | CreateChild
    | CreateSecret
    | DeletePod
    | DeleteJob
    | WriteStatus
    | WriteIntents
    | ReadLease
    | EmitEvent
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What to do now, and when to look again if nothing happens before."""

    actions: tuple[Action, ...] = ()
    wake_at_s: float | None = None
    reschedule: bool = False
    """Whether the cluster's scheduler must act: another place is not one job's to take."""
