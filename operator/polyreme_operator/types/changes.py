"""Effects of a change of the observed cluster."""

from __future__ import annotations

import dataclasses

from polyreme_cluster.port import ObjectRef
from polyreme_operator.types.lease_record import RefusedRecord
from polyreme_operator.types.views import ForeignPod


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An object that can't be read."""

    ref: ObjectRef
    uid: str
    why: str


@dataclasses.dataclass(slots=True)
class Changes:
    """Effects of a change of the cache."""

    jobs: set[str] = dataclasses.field(default_factory=set)
    """UIDs of jobs to reconcile."""
    capacity: bool = False
    """Whether jobs that did not fit before may fit now."""
    left: tuple[ForeignPod, ...] = ()
    """What foreign pods no longer use: room for some of those jobs, but no quota."""
    asks: bool = False
    """Whether the scheduler has something to decide."""
    taken: bool = False
    """Whether capacity that was free before is used now."""
    health: bool = False
    """Whether the health of nodes must be decided again."""
    unreadable: tuple[Unreadable, ...] = ()
    """Objects that are ignored."""
    refused: tuple[RefusedRecord, ...] = ()
    """Progress records that don't count."""

    def __or__(self, other: Changes) -> Changes:
        """Return the union of both."""
        return Changes(
            jobs=self.jobs | other.jobs,
            capacity=self.capacity or other.capacity,
            left=self.left + other.left,
            asks=self.asks or other.asks,
            taken=self.taken or other.taken,
            health=self.health or other.health,
            unreadable=self.unreadable + other.unreadable,
            refused=self.refused + other.refused,
        )
