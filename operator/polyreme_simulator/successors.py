"""Rule for replacement pods: none is created while a pod of the job that the same operator has deleted still runs.

An operator knows what it has deleted, and a pod that has ended, or is gone, stays so. So the rule holds when a write is
sent, however late watches are. A pod that its kubelet does not end is not waited for.
"""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_api.times import parse_rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.types.views import ENDS_WITHIN_S
from polyreme_simulator.cluster_history import ENDED
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

CLOCK_S = 1.0
"""Times of deletion are whole seconds."""


@dataclasses.dataclass(slots=True, eq=False)
class SuccessorFacts:
    """Pods that were deleted, by which replica."""

    observed: ObservedState
    _deleted: dict[str, dict[str, None]] = dataclasses.field(default_factory=dict)
    """UIDs of pods that each life of a replica has deleted."""

    def sending(self, name: str, verb: str, ref: ObjectRef, *, uid: str, world: ClusterView) -> None:
        """A replica sends a write.

        Args:
            name: The replica, and its process.
            verb: Of the API.
            ref: What is written.
            uid: The object's UID; of one that is created, its job's.
            world: The cluster.
        """
        if ref.kind != "Pod":
            return
        if verb == "delete":
            self._deleted.setdefault(name, {})[uid] = None
        elif verb == "create":
            for deleted in self._deleted.get(name, ()):
                self._check(ref, uid, deleted, world)

    def _check(self, ref: ObjectRef, job_uid: str, deleted: str, world: ClusterView) -> None:
        pod = self.observed.pods.get(deleted)
        if pod is None or pod["metadata"]["labels"][labels.LABEL_JOB_UID] != job_uid:
            return
        if (pod.get("status") or {}).get("phase") not in ENDED and not _is_stuck(pod, world):
            what = f"{ref.name} is created while {pod['metadata']['name']} runs"
            self.observed.broke("a worker waits for the end of those before it", what, world)


def _is_stuck(pod: Manifest, world: ClusterView) -> bool:
    deleted_at = pod["metadata"].get("deletionTimestamp")
    return deleted_at is not None and world.clock.now_s() - parse_rfc3339(deleted_at) >= ENDS_WITHIN_S - CLOCK_S
