"""Binding of worker pods to the nodes that placement chose, in one of three modes.

``NodeName`` skips every scheduler, for a cluster that only polyreme uses (``polyreme run``). ``NodeAffinity`` lets
kube-scheduler bind each pod to its one node: safe where others schedule too, since one scheduler counts all pods.
With ``GangBinder`` the operator binds by itself, only to nodes with its own taint, where no other pods run. It does
none of a scheduler's other work, so it refuses pods that need volumes bound, devices claimed, host ports or rules for
other pods. A job with a worker on a node without the taint is bound entirely by node affinity.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_operator.reconcile.observe import current_pods
from polyreme_operator.types.actions import Bind
from polyreme_operator.types.parse import tolerations_of
from polyreme_operator.types.snapshot import JobSnapshot

BindingMode: TypeAlias = Literal["NodeName", "NodeAffinity", "GangBinder"]

SCHEDULER = "polyreme"
"""``schedulerName`` of pods that the operator binds."""
_REQUIRED = "requiredDuringSchedulingIgnoredDuringExecution"
_LEFT_TO_SCHEDULERS = {
    "resourceClaims": ("resource claims", "name"),
    "topologySpreadConstraints": ("topology spread constraints", "topologyKey"),
    "schedulingGates": ("scheduling gates", "name"),
}
"""Lists of a pod's spec that the gang binder ignores, each with the key that identifies its entries."""
_NAMED_MAX = 3


def refusal(spec: TrainingJobSpec) -> str:
    """Return why the gang binder can't bind a job's pods; empty if it can."""
    body = spec.workers.template.get("spec") or {}
    for volume in body.get("volumes") or []:
        for kind in ("persistentVolumeClaim", "ephemeral"):
            if kind in volume:
                return _sentence(f"volume {volume.get('name', '?')} ({kind})", f"volumes[].{kind}")
    if held := _host_ports(body):
        return _sentence(f"ports of their host ({', '.join(held[:_NAMED_MAX])})", "containers[].ports[].hostPort")
    affinity = body.get("affinity") or {}
    for kind in ("podAffinity", "podAntiAffinity"):
        if affinity.get(kind):
            return _sentence(kind, f"affinity.{kind}")
    for field, (what, key) in _LEFT_TO_SCHEDULERS.items():
        if body.get(field):
            seen = ", ".join(str(entry.get(key, "?")) for entry in body[field][:_NAMED_MAX])
            return _sentence(f"{what} ({seen})", field)
    return ""


def mode_of(asked: BindingMode, snapshot: JobSnapshot, attempt: AttemptStatus) -> BindingMode:
    """Return the binding mode of an attempt: the gang binder only if the operator owns every node."""
    if asked != "GangBinder":
        return asked
    nodes = (snapshot.nodes.get(name) for name in dict.fromkeys(attempt.placement.node_by_index()))
    return "GangBinder" if all(node is not None and node.owned for node in nodes) else "NodeAffinity"


def fields(body: Mapping[str, Any], *, mode: BindingMode, node: str) -> dict[str, Any]:
    """Return the fields of a pod's spec that determine its node."""
    if mode == "NodeName":
        return {"nodeName": node, "tolerations": tolerations_of(body)}
    held = {"affinity": _held_to(body.get("affinity") or {}, node), "tolerations": tolerations_of(body)}
    return {**held, "schedulerName": SCHEDULER} if mode == "GangBinder" else held


def binds(snapshot: JobSnapshot, attempt: AttemptStatus) -> tuple[Bind, ...]:
    """Bind the pods that wait for the operator, but only to nodes that it owns."""
    nodes = attempt.placement.node_by_index()
    found = []
    for index, pod in sorted(current_pods(snapshot).items()):
        node = snapshot.nodes.get(nodes[index])
        waits = pod.scheduler == SCHEDULER and not pod.node and not pod.deleting and not pod.ended
        if waits and node is not None and node.owned and not node.is_faulty:
            found.append(Bind(ref=pod.ref, uid=pod.uid, node=node.name))
    return tuple(found)


def _held_to(affinity: Mapping[str, Any], node: str) -> dict[str, Any]:
    """Restrict a template's affinity to one node; its own terms still apply."""
    own = affinity.get("nodeAffinity") or {}
    terms = (own.get(_REQUIRED) or {}).get("nodeSelectorTerms") or [{}]
    here = {"key": "metadata.name", "operator": "In", "values": [node]}
    # Terms are alternatives, and the fields of one term must all match, so the node goes into every term.
    held = [{**term, "matchFields": [*(term.get("matchFields") or []), here]} for term in terms]
    return {**affinity, "nodeAffinity": {**own, _REQUIRED: {"nodeSelectorTerms": held}}}


def _host_ports(body: Mapping[str, Any]) -> list[str]:
    """Return the host ports of a pod; with host networking these are all its ports."""
    everything = bool(body.get("hostNetwork"))
    containers = (*(body.get("initContainers") or ()), *(body.get("containers") or ()))
    ports = [port for container in containers for port in container.get("ports") or ()]
    held = (port.get("hostPort") or (port.get("containerPort") if everything else None) for port in ports)
    return [str(port) for port in held if port]


def _sentence(what: str, field: str) -> str:
    return (
        f"the gang binder can't bind pods with {what}: it ignores volumes, resource claims, other pods and host "
        "ports; "
        f"remove spec.workers.template.spec.{field} or install the operator with binding NodeAffinity"
    )
