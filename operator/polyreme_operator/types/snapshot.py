"""What one decision about one job sees. What admission sees is ``scheduler.Cluster``."""

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
class Refusal:
    """What the API server answered to the creation or binding of an object of a job (400, 403, 422)."""

    attempt: int
    """Attempt for which the object was to be created."""
    message: str
    """The API server's sentence."""
    since_s: float
    """When it was refused first."""
    ends_attempt: bool
    """Whether the attempt can't go on: a pod or the Lease. Of what is not watched nobody knows whether it exists."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSnapshot:
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
    children_until_s: float | None = None
    """When one of them must be confirmed again."""
    secret_renewed: bool = False
    """Whether the Secret was created again while pods ran: they and new ones can't join each other."""
    refusal: Refusal | None = None
    """What the API server refused of the current attempt."""
    lease_read: bool = False
    """Whether the Lease was read after all else here was seen: watches of two kinds keep no order between them."""
