"""Which devices are taken, from what is: admitted placements, pods that have not ended, intents that are still open.

A worker's place (job, index, node) is charged once, by whichever of the three name it, so a job is charged from its
admission until its attempt is closed and its last pod, orphans included, is gone; a replacement that waits for its
predecessor on the same node is charged once.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator

from polyreme_operator.types.intents import IntentState, intent_state
from polyreme_operator.types.snapshot import Cluster
from polyreme_operator.types.views import JobView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Charge:
    """Devices that one worker's place takes."""

    uid: str
    index: int
    node: str
    queue: str
    resource: str
    devices: int


class Usage:
    """Devices taken by node and by queue. Changed only by the decision that made it."""

    def __init__(self) -> None:
        self._charged: dict[tuple[str, int, str], Charge] = {}
        self._by_node: Counter[tuple[str, str]] = Counter()
        self._by_queue: Counter[tuple[str, str]] = Counter()

    def add(self, charge: Charge) -> None:
        """Charge a place, unless it is charged already."""
        key = (charge.uid, charge.index, charge.node)
        if key in self._charged:
            return
        self._charged[key] = charge
        self._by_node[charge.node, charge.resource] += charge.devices
        self._by_queue[charge.queue, charge.resource] += charge.devices

    def on_node(self, node: str, resource: str) -> int:
        """Devices taken on a node."""
        return self._by_node[node, resource]

    def in_queue(self, queue: str, resource: str) -> int:
        """Devices taken by a queue's jobs."""
        return self._by_queue[queue, resource]

    def holds(self, uid: str, index: int, node: str) -> bool:
        """Tell whether a place is charged."""
        return (uid, index, node) in self._charged


def usage_of(cluster: Cluster) -> Usage:
    """Recompute what is taken."""
    usage = Usage()
    for job in cluster.jobs:
        if job.admitted:
            for charge in placement_charges(job):
                usage.add(charge)
    for pod in cluster.pods:
        if pod.node and not pod.ended:
            usage.add(
                Charge(
                    uid=pod.job_uid,
                    index=pod.index,
                    node=pod.node,
                    queue=pod.queue,
                    resource=pod.resource,
                    devices=pod.devices,
                )
            )
    jobs = {job.uid: job for job in cluster.jobs}
    for intent in cluster.intents.entries:
        if intent_state(intent, jobs) is IntentState.OPEN:
            for index, node in enumerate(intent.placement.node_by_index()):
                usage.add(
                    Charge(
                        uid=intent.uid,
                        index=index,
                        node=node,
                        queue=intent.queue,
                        resource=intent.resource,
                        devices=intent.devices,
                    )
                )
    return usage


def placement_charges(job: JobView) -> Iterator[Charge]:
    """Yield what the current attempt's placement takes."""
    attempt = job.attempt
    if attempt is None or job.spec is None:
        return
    for index, node in enumerate(attempt.placement.node_by_index()):
        yield Charge(
            uid=job.uid,
            index=index,
            node=node,
            queue=job.spec.queue_name,
            resource=job.spec.workers.device_resource,
            devices=attempt.devices,
        )
