"""Input of a scheduling cycle: a snapshot of nodes and usage, and the cache's indices, which it only reads."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Iterable, Mapping, Sequence

from polyreme_cluster.port import ObjectRef
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.usage import UsageLedger, pod_charge
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.queueing.waiting import WaitingIndex
from polyreme_operator.types.intents import Intents
from polyreme_operator.types.inventory import Inventory, LevelView, SparesView
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.snapshot import Pending
from polyreme_operator.types.views import ForeignPod, JobView, LeaseView, NodeView, PodView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSnapshot:
    """Everything that admission and placement depend on."""

    inventory: Inventory
    jobs: Mapping[str, JobView]
    """By UID, as all that follows."""
    waiting: WaitingIndex
    running: Collection[str]
    """Jobs that hold an admission."""
    resizing: Collection[str]
    """Running jobs that want another worker count, or may grow."""
    exclusive: Collection[str]
    victims_of: Mapping[str, Collection[str]]
    """Victims that have not been admitted again, by the UID of their preemptor."""
    asking: Collection[str]
    """Running jobs that have lost a place and need another one."""
    pods: Mapping[str, Mapping[ObjectRef, PodView]]
    leases: Mapping[str, LeaseView]
    nodes: Mapping[str, NodeView]
    """By name; includes nodes without a Node object on which jobs in ``asking`` have places."""
    tree: QueueTree
    used: Mapping[tuple[str, str], int]
    """Amount used, by queue and resource."""
    refused: Mapping[int, Pending] = dataclasses.field(default_factory=dict)
    """Classes of waiting jobs that did not fit, while no capacity has been freed since."""
    intents: Intents = dataclasses.field(default_factory=Intents)
    settled: Collection[str] = frozenset()
    """UIDs of jobs of the intents whose intended write can't be applied any more, whatever their status says."""
    spares: SparesView | None = None
    leases_read: frozenset[str] = frozenset()
    """UIDs of jobs whose Lease was read after everything else here was seen."""


def cluster_of(
    *,
    jobs: Iterable[JobView] = (),
    pods: Iterable[PodView] = (),
    nodes: Iterable[NodeView] = (),
    leases: Iterable[LeaseView] = (),
    queues: Sequence[QueueView] = (),
    levels: Sequence[LevelView] = (),
    spares: SparesView | None = None,
    foreign: Iterable[ForeignPod] = (),
    intents: Intents | None = None,
    leases_read: frozenset[str] = frozenset(),
) -> ClusterSnapshot:
    """Build a snapshot from views alone; every running job asks."""
    table = NodeTable()
    table.set_levels(levels)
    for node in nodes:
        table.put(node)
    ledger = UsageLedger(table)
    index = JobIndex(ledger)
    for job in jobs:
        index.put(job)
    by_job: dict[str, dict[ObjectRef, PodView]] = {}
    for pod in pods:
        by_job.setdefault(pod.job_uid, {})[pod.ref] = pod
        if (taken := pod_charge(pod)) is not None:
            ledger.charge(taken[0], pod.uid, taken[1])
    for other in foreign:
        table.add(other.node, other.requests, 1, busy=False)
    return ClusterSnapshot(
        inventory=table.snapshot(),
        spares=spares,
        jobs=index.views,
        waiting=index.waiting,
        running=index.running,
        resizing=index.resizing,
        exclusive=index.exclusive,
        victims_of=index.victims_of,
        asking=index.running,
        pods=by_job,
        leases={lease.job_uid: lease for lease in leases},
        nodes=table.views,
        tree=QueueTree.of(queues),
        used=ledger.used,
        intents=intents or Intents(),
        leases_read=leases_read,
    )
