"""Pods that follow others of their job: none is created while one that the same operator told to go still runs.

Who has told a pod to go knows of it, and that a pod has ended, or is gone, never turns out untrue. So the rule holds at
the moment at which a write is sent, however late watches are.
"""

from __future__ import annotations

from polyreme_api import labels
from polyreme_operator.port import ObjectRef
from polyreme_simulator.capacity import ENDED
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState


class SuccessorFacts:
    """Pods that were told to go, by whom.

    Args:
        observed: What the store's log showed; a broken rule is noted there.
    """

    def __init__(self, observed: ObservedState) -> None:
        self._observed = observed
        self._told: dict[str, dict[str, None]] = {}
        """UIDs of pods that each life of a replica has deleted."""

    def sending(self, name: str, verb: str, ref: ObjectRef, *, uid: str, world: ClusterView) -> None:
        """A replica sends a write.

        Args:
            name: Which life of which replica.
            verb: Of the API.
            ref: What is written.
            uid: The object's UID; of one that is created, its job's.
            world: The cluster.
        """
        if ref.kind != "Pod":
            return
        if verb == "delete":
            self._told.setdefault(name, {})[uid] = None
        elif verb == "create":
            for told in self._told.get(name, ()):
                self._check(ref, uid, told, world)

    def _check(self, ref: ObjectRef, job_uid: str, told: str, world: ClusterView) -> None:
        pod = self._observed.pods.get(told)
        if pod is None or pod["metadata"]["labels"][labels.LABEL_JOB_UID] != job_uid:
            return
        if (pod.get("status") or {}).get("phase") not in ENDED:
            what = f"{ref.name} is created while {pod['metadata']['name']} runs"
            self._observed.broke("a worker waits for the end of those before it", what, world)
