"""What a change of the observed cluster calls for."""

from __future__ import annotations

import dataclasses

from polyreme_operator.port import ObjectRef


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Unreadable:
    """An object whose reading raised an error."""

    ref: ObjectRef
    uid: str
    why: str


@dataclasses.dataclass(slots=True)
class Changes:
    """What a change of the model calls for."""

    jobs: set[str] = dataclasses.field(default_factory=set)
    """UIDs of jobs to look at."""
    capacity: bool = False
    """Whether what did not fit before may fit now."""
    asks: bool = False
    """Whether somebody asks for what the scheduler decides."""
    taken: bool = False
    """Whether some of what was free before is taken now."""
    unreadable: tuple[Unreadable, ...] = ()
    """Objects that were left out."""

    def __or__(self, other: Changes) -> Changes:
        """Join two."""
        return Changes(
            jobs=self.jobs | other.jobs,
            capacity=self.capacity or other.capacity,
            asks=self.asks or other.asks,
            taken=self.taken or other.taken,
            unreadable=self.unreadable + other.unreadable,
        )
