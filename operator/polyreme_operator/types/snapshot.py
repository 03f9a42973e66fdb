"""Input of a decision about one job; the scheduler's input is ``scheduler.ClusterSnapshot``."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.views import JobView, LeaseView, NodeView, PodView


@dataclasses.dataclass(frozen=True, slots=True)
class Pending:
    """Why a job waits."""

    reason: Reason
    message: str
    permanent: bool = False
    """Whether only other nodes or another request would help, but no freed capacity."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Refusal:
    """The API server's refusal to create or bind an object of a job (400, 403, 422)."""

    attempt: int
    """Attempt for which the object was created."""
    message: str
    """The API server's message."""
    since_s: float
    """Time of the first refusal."""
    ends_attempt: bool
    """Whether the attempt can't continue: true for pods and the Lease, while other objects may exist already."""


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
    pending: Pending | None = None
    """The published pending reason; None until a cycle has looked at the job."""
    refused: str = ""
    """Why the scheduler keeps a size that differs from the spec; empty if it does not."""
    children: frozenset[str] = frozenset()
    """Kinds of the job's other objects that are known to exist."""
    children_until_s: float | None = None
    """When the first of them must be confirmed again."""
    refusal: Refusal | None = None
    """A refused object of the current attempt."""
    lease_read: bool = False
    """Whether the Lease was read after everything else in this snapshot; watches of two kinds are not ordered."""
