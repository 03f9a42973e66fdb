"""What one decision about one job sees. What admission sees is ``core.schedule.Cluster``."""

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
    """Whether only other nodes, or another request, would help: nothing that comes free does."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobScene:
    """Everything that one job's reconcile depends on."""

    job: JobView
    pods: tuple[PodView, ...] = ()
    nodes: Mapping[str, NodeView] = dataclasses.field(default_factory=dict)
    """Nodes by name; those that the job's pods and placement name are enough. One without a Node object stands
    here as not ready."""
    lease: LeaseView | None = None
    pending: Pending | None = None
    """The last word of ``schedule`` on this job; None while it has not spoken."""
    refused: str = ""
    """Why ``schedule`` keeps the job's size though its spec says another; empty when it does not."""
    children: frozenset[str] = frozenset()
    """Kinds of the objects beside its pods that are known to exist for this job."""
    lease_read: bool = False
    """Whether the Lease was read after all else here was seen: watches of two kinds keep no order between them."""
