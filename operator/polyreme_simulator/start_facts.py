"""Rules for pods that their nodes reject: they cost no budget, and a worker leaves a node that rejected it."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest
from polyreme_simulator.capacity import CapacityFacts
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

FREE_FOR_S = 10.0
"""How long another node must have had room before a worker must have been moved there."""
FRESH_S = 1.5
"""How old that may be: it is looked at every second, but not all the time."""
LONG_S = 30.0
"""Time within which two rejections of one worker by one node count as a return."""


@dataclasses.dataclass(slots=True, eq=False)
class StartFacts:
    """Which pods were rejected, and where there was room."""

    observed: ObservedState
    history: ClusterHistory
    capacity: CapacityFacts
    _rejected: dict[tuple[str, int, int], str] = dataclasses.field(default_factory=dict)
    """UID of the pod that was rejected last, by job, worker index and replacement number."""
    _last: dict[tuple[str, int], tuple[str, float]] = dataclasses.field(default_factory=dict)
    """Node and time of the last rejection of a worker."""
    _free_since_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Since when each node has had a free device and taken pods."""
    _looked_s: float = 0.0

    def rejected(self, pod: Manifest, world: ClusterView) -> None:
        """A kubelet rejects a pod."""
        node, now_s = pod["spec"]["nodeName"], world.time_s()
        uid, index, _ = worker = _worker_of(pod)
        self._rejected[worker] = pod["metadata"]["uid"]
        before = self._last.get((uid, index))
        self._last[uid, index] = (node, now_s)
        if before is None or before[0] != node or now_s - before[1] > LONG_S or self.history.blind(world):
            return
        if now_s - self._looked_s > FRESH_S:
            return
        # Another worker may have taken the last device since.
        self.look(world)
        job = self.observed.jobs.get(uid)
        if job is None or job["spec"].get("topology") or job["spec"]["workers"].get("devices", 1) > 1:
            # Single devices do not show which other node would do.
            return
        queues, queue = self.history.queues, job["spec"].get("queueName", "default")
        used = self.capacity.held_by_queue(without={uid})
        size = job["spec"]["workers"]["replicas"]
        if not queues.in_order(queue) or not queues.admits(used, queue, labels.RESOURCE_DEVICE, size):
            # A queue that uses more than its quota has none for a move.
            return
        if any(_holds_nodes(other) for other in self.observed.jobs.values()):
            return
        failed = {each["node"] for each in (job.get("status") or {}).get("failedNodes") or ()}
        others = [name for name, since_s in self._free_since_s.items() if name not in failed and since_s <= before[1]]
        if others:
            what = f"{pod['metadata']['name']} is rejected by {node} again, {others[0]} has room"
            self.observed.broke("a worker leaves a node that rejects it", what, world)

    def begun(self, uid: str, name: str, record: dict[str, Any], old: dict[int, int], world: ClusterView) -> None:
        """An attempt begins after a failure.

        Args:
            uid: The job.
            name: Its name.
            record: The restart's record.
            old: Replacement numbers of the attempt that failed.
            world: The cluster.
        """
        index = record.get("index")
        world.reached[f"restart: {record.get('cause')}", ""] += 1
        if index is None:
            return
        worker = (uid, index, old.get(index, 0))
        if worker not in self._rejected:
            return
        present = {pod["metadata"]["uid"] for pod in self.observed.pods.values() if _worker_of(pod) == worker}
        if record.get("cause") == "PodLost" and self._rejected[worker] not in present:
            # Another deleted it, perhaps before an operator saw how it ended; it may have been created again.
            return
        if record.get("counts", True) and record.get("cause") in {"PodFailed", "PodLost", "PodRejected"}:
            what = f"{name} worker {index}: {record.get('cause')}"
            self.observed.broke("a pod that was rejected costs no budget", what, world)

    def look(self, world: ClusterView) -> None:
        """Note since when nodes have had room."""
        self._looked_s = world.time_s()
        taken = self.capacity.held_by_node()
        for name, count, _ in self.history.foreign.values():
            taken[name] += count
        for node in world.nodes.values():
            free = node.present and node.up and not node.fails and world.usable(node.name)
            if free and taken[node.name] < node.devices and self.history.domains.labelled(node.name):
                self._free_since_s.setdefault(node.name, world.time_s() + FREE_FOR_S)
            else:
                self._free_since_s.pop(node.name, None)


def _worker_of(pod: Manifest) -> tuple[str, int, int]:
    """Return job, worker index and replacement number of a pod."""
    tags = pod["metadata"]["labels"]
    return tags[labels.LABEL_JOB_UID], int(tags[labels.LABEL_INDEX]), int(tags[labels.LABEL_REPLACEMENT])


def _holds_nodes(job: Manifest) -> bool:
    """Tell whether nodes are kept free for a job, since others were preempted for it, or its domain is exclusive."""
    topology, status = job["spec"].get("topology") or {}, job.get("status") or {}
    return bool(topology.get("exclusive") or status.get("preemption"))
