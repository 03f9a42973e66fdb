"""Input of a decision about one job; the scheduler's input is ``scheduler.ClusterSnapshot``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_operator.types.inventory import LevelView
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.views import JobView, LeaseView, NodeView, PodView


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """Why a job waits."""

    reason: Reason
    message: str
    permanent: bool = False
    """Whether only other nodes or another request would help, but no freed capacity."""


ENDING_KINDS = frozenset({"Pod", "Lease"})
"""Kinds of objects without which an attempt can't continue; other objects of a job may exist although refused."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusedSize:
    """Why the scheduler keeps the size of a running job that its spec wants to change."""

    generation: int
    """Generation of the spec that was looked at."""
    why: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The API server's refusal to create or bind an object of a job (400, 403, 422)."""

    kind: str
    attempt: int
    """Attempt for which the object was last tried."""
    message: str
    """The API server's last message."""
    since_s: float
    """Time of the first refusal."""
    tried_s: float = 0.0
    """Time of the last one."""
    tries: int = 1
    """Refusals since the attempt began; 0 if the object is to be tried at once."""
    missing: bool = False
    """Whether the object is known not to exist. Otherwise it may, since a quota is checked first."""

    @property
    def ends_attempt(self) -> bool:
        """Whether the attempt can't continue: true for pods and the Lease, while other objects may exist already."""
        return self.kind in ENDING_KINDS


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
    """Everything that one job's reconcile depends on."""

    job: JobView
    pods: tuple[PodView, ...] = ()
    nodes: Mapping[str, NodeView] = dataclasses.field(default_factory=dict)
    """By name, at least those of the job's pods and placement. A node without a Node object counts as not ready."""
    lease: LeaseView | None = None
    start_limit_s: float = 0.0
    """How long its queue lets pods take to start before the job is set aside; 0: no limit."""
    levels: tuple[LevelView, ...] = ()
    """Levels of the topology, top first."""
    pending: Pending | None = None
    """The published pending reason; None until a cycle has looked at the job."""
    refused: str = ""
    """Why the scheduler keeps a size that differs from the present spec; empty if it does not."""
    children: frozenset[str] = frozenset()
    """Kinds of the job's other objects that are known to exist."""
    children_until_s: float | None = None
    """When the first of them must be confirmed again."""
    refusals: tuple[Refusal, ...] = ()
    """What the API server refuses to create, each kind once."""
    lease_read: bool = False
    """Whether the Lease was read after everything else in this snapshot; watches of two kinds are not ordered."""
    leaders_running: frozenset[str] = frozenset()
    """UIDs of leaders' pods whose process was seen to run, as the operator can on one machine; else unknown."""
