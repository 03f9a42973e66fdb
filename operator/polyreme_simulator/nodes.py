"""Machines of the simulated cluster, and what their Node objects and pods say of them."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_cluster.port import Manifest
from polyreme_operator.health.record import HEALTH, NodeState, parse

OWNED = {"key": "polyreme.dev/owned", "effect": "NoSchedule"}
"""Taint of nodes that are reserved for training jobs."""


@dataclasses.dataclass(slots=True)
class SimNode:
    """A machine."""

    name: str
    devices: int
    labels: dict[str, str] = dataclasses.field(default_factory=dict)
    up: bool = True
    present: bool = True
    """Whether the cluster has it: a removed one is no more."""
    rejects: str = ""
    """Reason for which its kubelet rejects every pod; empty: it does not."""
    starts_pods: bool = True
    ends_pods: bool = True

    @property
    def fails(self) -> bool:
        """Whether its kubelet is up and does not do its work."""
        return bool(self.rejects) or not (self.starts_pods and self.ends_pods)


def takes_pods(node: Manifest) -> bool:
    """Tell whether new pods may go to a machine, as far as its Node object says."""
    ready = any(entry["type"] == "Ready" and entry["status"] == "True" for entry in node["status"]["conditions"])
    taints = (node.get("spec") or {}).get("taints") or ()
    foreign = any(taint["effect"] != "PreferNoSchedule" and taint["key"] != OWNED["key"] for taint in taints)
    return ready and not foreign and not (node.get("spec") or {}).get("unschedulable")


def opted_in_only(node: Manifest) -> bool:
    """Tell whether only jobs with ``acceptProbation`` use a node, since it was repaired a short while ago."""
    record, _ = parse((node["metadata"].get("annotations") or {}).get(HEALTH))
    return record is not None and record.opt_in and record.state is NodeState.PROBATION


def devices_of(pod: Manifest) -> int:
    """Return the devices that a pod asks for."""
    limits = (pod["spec"]["containers"][0].get("resources") or {}).get("limits") or {}
    return int(limits.get(labels.RESOURCE_DEVICE, 0))
