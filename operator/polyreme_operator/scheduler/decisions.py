"""Decisions of one scheduling cycle: the writes, and why the other jobs wait."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.job import TrainingJobStatus
from polyreme_operator.types.actions import WriteIntents, WriteStatus
from polyreme_operator.types.intents import Intent, Intents, next_attempt
from polyreme_operator.types.snapshot import Pending, RefusedSize
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Decisions of one cycle. ``intents`` is written first; each of ``writes`` is independent of the others."""

    intents: WriteIntents | None = None
    writes: tuple[WriteStatus, ...] = ()
    pending: Mapping[str, Pending] = dataclasses.field(default_factory=dict)
    """Why a job waits for reasons of its own, by UID."""
    kinds: Mapping[int, Pending] = dataclasses.field(default_factory=dict)
    """Why all jobs of a class wait."""
    unsure: frozenset[int] = frozenset()
    """Those of these classes to try again even if no capacity is freed."""
    refused: Mapping[str, RefusedSize] = dataclasses.field(default_factory=dict)
    """Why a running job keeps its size though its spec says another, by UID."""
    reads: frozenset[str] = frozenset()
    """UIDs of jobs whose Lease must be read before an attempt may be ended or begun; then decide again."""
    again: bool = False
    """Whether the cycle reached one of its limits, so that there is more to decide now."""
    wake_at_s: float | None = None
    """When time alone may change what was decided."""


class Decisions:
    """The decisions made so far."""

    def __init__(self) -> None:
        self.pending: dict[str, Pending] = {}
        self.kinds: dict[int, Pending] = {}
        self.changed: set[str] = set()
        self.again = False
        self.unsure: set[int] = set()
        """Refused classes for which not everything was tried."""
        self.entries: list[Intent] = []
        self.reads: set[str] = set()
        self._refused: dict[str, RefusedSize] = {}
        self._writes: list[WriteStatus] = []
        self._wake_at_s: float | None = None

    def batch(self, intents: Intents) -> Batch:
        """Return what was decided, given the intents that are stored."""
        entries = tuple(self.entries)
        version = intents.resource_version
        # Create a missing object at once, even empty: a successor that finds none must cancel every job.
        lost = version is None and bool(intents.entries)
        return Batch(
            intents=WriteIntents(resource_version=version, entries=entries) if entries or lost else None,
            writes=tuple(self._writes),
            pending=self.pending,
            kinds=self.kinds,
            unsure=frozenset(self.unsure),
            refused=self._refused,
            reads=frozenset(self.reads),
            again=self.again,
            wake_at_s=self._wake_at_s,
        )

    def refuse_size(self, job: JobView, why: str) -> None:
        """Note why a running job keeps its size though its spec says another."""
        self._refused[job.uid] = RefusedSize(generation=job.generation, why=why)

    def wake_at(self, at_s: float) -> None:
        """Run another cycle at this time at the latest."""
        self._wake_at_s = at_s if self._wake_at_s is None else min(self._wake_at_s, at_s)

    def intend(self, job: JobView) -> None:
        """Add the next attempt of a job to the intents: it takes capacity that others might take too."""
        self.entries.append(next_attempt(job))

    def write(self, job: JobView, after: TrainingJobStatus) -> None:
        """Add a status write."""
        self.changed.add(job.uid)
        if after != job.status:
            self._writes.append(status_write(job, after))


def status_write(job: JobView, after: TrainingJobStatus) -> WriteStatus:
    """Return the write that replaces a job's status."""
    return WriteStatus(ref=job.ref, uid=job.uid, resource_version=job.resource_version, before=job.status, after=after)
