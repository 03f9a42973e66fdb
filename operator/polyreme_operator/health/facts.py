"""Facts about a node from which its state is decided, and the decision."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from polyreme_operator.health.policy import GRAVITY, Judged, PolicyView
from polyreme_operator.health.record import Record
from polyreme_operator.health.repair import JobSight
from polyreme_operator.health.signs import Reading


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeFacts:
    """What is known of one node when its state is decided."""

    name: str
    reading: Reading = dataclasses.field(default_factory=Reading)
    record: Record | None = None
    broken: str = ""
    """Why its annotation can't be trusted; empty: it can, or there is none."""
    tainted: bool = False
    """Whether it has our taint."""
    workers: int = 0
    """Workers of any job that have not left it."""
    loaded: bool = False
    """Whether a worker runs on it."""
    policy: PolicyView | None = None
    """The one policy that selects it."""
    latched: bool = False
    """Whether the breaker of that policy is latched."""
    repairs: bool = False
    """Whether the operator may run hooks."""
    claimed: str = ""
    """Another tool that repairs it."""
    others: int | None = None
    """Pods on it that are no workers, and that a repair would end; None: not counted."""
    job: JobSight | None = None
    """What was last read of the Job of its repair."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Note:
    """What happened, for an event."""

    reason: str
    message: str
    warning: bool = False


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """The next state of a node."""

    record: Record | None
    """Record to store; None: the node needs none."""
    changed: bool = False
    """Whether node and record differ from what is stored."""
    needs_charge: bool = False
    """Whether this takes the node out of service, which the breaker must allow first."""
    refusable: Record | None = None
    """Record to store instead if the breaker does not allow it."""
    judged: tuple[Judged, ...] = ()
    notes: tuple[Note, ...] = ()
    wake_at_s: float | None = None
    """When time alone may change the decision."""
    with_domain: str = ""
    """The evacuation rule by which it is taken out with its whole domain; empty: for a fault of its own."""

    @property
    def out(self) -> bool:
        """Whether the node has the taint afterwards."""
        return self.record is not None and self.record.state.is_out

    @property
    def gravest(self) -> Judged | None:
        """The gravest sign that takes, or would take, the node out of service."""
        return gravest(each for each in self.judged if each.grave)


def gravest(judged: Iterable[Judged]) -> Judged | None:
    """Return the gravest sign."""
    return max(judged, key=lambda each: (GRAVITY[each.answer], each.sign.row.fatal, each.sign.last_s), default=None)
