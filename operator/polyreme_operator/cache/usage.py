"""Usage ledger, charged by admitted placements and by pods that have not ended.

A worker's place (job, index, node) is charged to its node once, even if both name it, so a job is charged from its
admission until its attempt is closed and its last pod, orphans included, is gone; a replacement that waits for its
predecessor on the same node is charged once. If they differ, since a pod was resized in place for one, the larger
amount of each resource counts. To its queue a worker (job, index) is charged once, however many nodes its
places are on: a worker that moves takes two nodes until its old pod is gone, but its queue has no worker more. Open
intents need no charge, since nothing is admitted before they are settled.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.types.inventory import Requests
from polyreme_operator.types.resources import larger
from polyreme_operator.types.views import JobView, PodView

Place: TypeAlias = tuple[str, int, str]
"""UID of the job, worker index, node."""
BY_PLACEMENT = ""
"""Source of the charge of an admitted placement; a pod's charge has its UID as source."""


@dataclasses.dataclass(frozen=True, slots=True)
class Charge:
    """Usage of one worker's place, and its queue."""

    queue: str
    requests: Requests


class UsageLedger:
    """Charges by place, updated as jobs and pods come and go.

    Of several sources of one place the placement says which queue is charged, and of several pods the first by UID; the
    same is true of several places of one worker. Usage depends on what is there, not on the order in which it was seen.
    """

    def __init__(self, nodes: NodeTable) -> None:
        self.used: dict[tuple[str, str], int] = defaultdict(int)
        """Amount by queue and resource."""
        self._nodes = nodes
        self._sources: dict[Place, dict[str, Charge]] = {}
        self._nodes_of: dict[tuple[str, int], tuple[str, ...]] = {}
        """Nodes of a worker's places; mostly one."""
        self._jobs_by_node: dict[str, dict[str, int]] = {}

    def charge(self, place: Place, source: str, charge: Charge) -> bool:
        """Charge a place; tell whether usage has decreased."""
        worker, sources = place[:2], self._sources.get(place)
        before, queued = None if sources is None else _charge_of(sources), self._queued(worker)
        if sources is None:
            sources = self._sources[place] = {}
            self._nodes_of[worker] = (*self._nodes_of.get(worker, ()), place[2])
            self._count(place, 1)
        sources[source] = charge
        return self._rebook(place, before, queued)

    def release(self, place: Place, source: str) -> bool:
        """Remove one source of a charge; tell whether usage has decreased."""
        worker, sources = place[:2], self._sources.get(place)
        if sources is None or source not in sources:
            return False
        before, queued = _charge_of(sources), self._queued(worker)
        del sources[source]
        if not sources:
            del self._sources[place]
            left = tuple(node for node in self._nodes_of[worker] if node != place[2])
            if left:
                self._nodes_of[worker] = left
            else:
                del self._nodes_of[worker]
            self._count(place, -1)
        return self._rebook(place, before, queued)

    def jobs_on(self, node: str) -> Iterable[str]:
        """Return the UIDs of jobs that have a place on a node."""
        return self._jobs_by_node.get(node, ())

    def _rebook(self, place: Place, before: Charge | None, queued: Charge | None) -> bool:
        """Bring node and queue from these charges to the present ones; tell whether usage may have decreased."""
        sources = self._sources.get(place)
        after, charged = None if sources is None else _charge_of(sources), self._queued(place[:2])
        for charge, sign in ((before, -1), (after, 1)):
            if before != after and charge is not None:
                self._nodes.add(place[2], charge.requests, sign, busy=True)
        for charge, sign in ((queued, -1), (charged, 1)):
            if queued != charged and charge is not None:
                for resource, amount in charge.requests:
                    self.used[charge.queue, resource] += sign * amount
        return (before is not None and before != after) or (queued is not None and queued != charged)

    def _queued(self, worker: tuple[str, int]) -> Charge | None:
        """Return what a worker's queue is charged for it; None if it has no place."""
        nodes = self._nodes_of.get(worker)
        if nodes is None:
            return None
        sources = self._sources[(*worker, nodes[0])]
        if len(nodes) > 1:
            sources = min((self._sources[(*worker, node)] for node in nodes), key=min)
        return _charge_of(sources)

    def _count(self, place: Place, sign: int) -> None:
        uid, _, node = place
        jobs = self._jobs_by_node.setdefault(node, {})
        jobs[uid] = jobs.get(uid, 0) + sign
        if not jobs[uid]:
            del jobs[uid]
        if not jobs:
            del self._jobs_by_node[node]


def _charge_of(sources: Mapping[str, Charge]) -> Charge:
    """Return the charge of a place: the first source's, with the larger amount of each resource."""
    first = sources[min(sources)]
    requests = first.requests
    for each in sources.values():
        requests = larger(requests, each.requests)
    return first if requests is first.requests else Charge(first.queue, requests)


def pod_charge(pod: PodView) -> tuple[Place, Charge] | None:
    """Return the charge of a pod; None if it has ended or has no place."""
    if not pod.place or pod.ended:
        return None
    return (pod.job_uid, pod.index, pod.place), Charge(pod.queue, pod.requests)


def placement_charges(job: JobView) -> Iterator[tuple[Place, Charge]]:
    """Yield the charges of an admitted job's placement."""
    attempt = job.attempt
    if not job.admitted or attempt is None or job.spec is None:
        return
    charge = Charge(job.spec.queue_name, job.requests)
    for index, node in enumerate(attempt.placement.node_by_index()):
        yield (job.uid, index, node), charge
