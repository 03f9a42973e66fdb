"""A small kube-scheduler: binds pods that name it to nodes that accept them and have room; says when none has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.nodes import devices_of
from polyreme_simulator.ownership import is_set_apart

SCHEDULER_S = 0.5
"""Longest time until it looks at pending pods."""
NAME = "default-scheduler"
ENDED = frozenset({"Succeeded", "Failed"})


class SchedulerContext(ClusterView, Protocol):
    """What the scheduler needs of the simulated cluster."""

    def soon(self, longest_s: float, act: Callable[[], Any]) -> None:
        """Do something at some time within ``longest_s``."""

    def node_object(self, name: str) -> Manifest:
        """Return a machine's Node object, for looking at it only."""


class KubeScheduler:
    """The cluster's scheduler.

    Args:
        world: The cluster.
    """

    def __init__(self, world: SchedulerContext) -> None:
        self._world = world
        self._looks = False

    def look_soon(self) -> None:
        """Look at the pods that wait, a little later."""
        if not self._looks:
            self._looks = True
            self._world.soon(SCHEDULER_S, self._look)

    def _look(self) -> None:
        self._looks = False
        waiting, free = self._read()
        for pod in waiting:
            devices = devices_of(pod)
            fits = sorted(
                (name for name in free if free[name] >= devices and accepts(pod, self._world.node_object(name))),
                key=lambda name: (free[name], name),
            )
            if not fits:
                self._refuse(pod)
                continue
            free[fits[0]] -= devices
            ref = ObjectRef.of(pod)
            self._world.store.bind(ref, uid=pod["metadata"]["uid"], node=fits[0])
            self._world.reached["bound by kube-scheduler", ""] += 1

    def _read(self) -> tuple[list[Manifest], dict[str, int]]:
        """Return the pods that wait, and the devices that each present node has left."""
        nodes = self._world.nodes
        free = {name: node.devices for name, node in nodes.items() if node.present}
        waiting: list[Manifest] = []
        for record in self._world.store.records("Pod"):
            pod = record.manifest
            if is_set_apart(pod):
                continue
            name = pod["spec"].get("nodeName")
            if name:
                if name in free and (pod.get("status") or {}).get("phase") not in ENDED:
                    free[name] -= devices_of(pod)
            elif pod["spec"].get("schedulerName", NAME) == NAME and not pod["metadata"].get("deletionTimestamp"):
                waiting.append(pod)
        return waiting, free

    def _refuse(self, pod: Manifest) -> None:
        known = (pod.get("status") or {}).get("conditions") or []
        if any(entry["type"] == "PodScheduled" and entry["status"] == "False" for entry in known):
            return
        condition = {
            "type": "PodScheduled",
            "status": "False",
            "reason": "Unschedulable",
            "message": "no node has room",
            "lastTransitionTime": rfc3339(self._world.clock.now_s()),
        }
        self._world.reached["Unschedulable", ""] += 1
        self._world.store.change(ObjectRef.of(pod), {"status": {"conditions": [condition]}}, subresource="status")


def accepts(pod: Manifest, node: Manifest) -> bool:
    """Tell whether taints, readiness and the pod's own affinity let a pod go to a node."""
    if (node.get("spec") or {}).get("unschedulable") or not _ready(node):
        return False
    tolerations = pod["spec"].get("tolerations") or ()
    for taint in (node.get("spec") or {}).get("taints") or ():
        if not any(_tolerates(toleration, taint) for toleration in tolerations):
            return False
    affinity = ((pod["spec"].get("affinity") or {}).get("nodeAffinity") or {}).get(
        "requiredDuringSchedulingIgnoredDuringExecution"
    )
    return affinity is None or any(_matches(term, node) for term in affinity["nodeSelectorTerms"])


def _ready(node: Manifest) -> bool:
    return any(entry["type"] == "Ready" and entry["status"] == "True" for entry in node["status"]["conditions"])


def _tolerates(toleration: dict[str, Any], taint: dict[str, Any]) -> bool:
    if toleration.get("effect") not in {None, "", taint["effect"]}:
        return False
    if toleration.get("key") not in {None, "", taint["key"]}:
        return False
    return bool(
        toleration.get("operator", "Equal") == "Exists" or toleration.get("value", "") == taint.get("value", "")
    )


def _matches(term: dict[str, Any], node: Manifest) -> bool:
    tags = node["metadata"].get("labels") or {}
    named = {"metadata.name": node["metadata"]["name"]}
    wanted = [(tags, entry) for entry in term.get("matchExpressions") or ()]
    wanted += [(named, entry) for entry in term.get("matchFields") or ()]
    return bool(wanted) and all(values.get(entry["key"]) in entry["values"] for values, entry in wanted)
