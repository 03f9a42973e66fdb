"""Requests that the cluster could not satisfy even if all of its nodes were empty and in service.

Only new or changed nodes help such a request, so it is reported before quota and capacity, and nothing is reserved or
preempted for it. The result depends on nodes alone and is cached for one version of them.

Shape suffixes: N nodes.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from polyreme_operator.health.record import PROBATION
from polyreme_operator.placement.domains import Rooms, rooms_of, smallest_domain
from polyreme_operator.placement.eligible import REMEMBERED_MAX, room_N, selected_N, tolerated_N
from polyreme_operator.placement.topology_request import TopologyRequest, level_name, topology_request_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import (
    CPU,
    MEMORY,
    PODS,
    Constraints,
    GangRequest,
    Inventory,
    RowArray,
    Unschedulable,
)
from polyreme_operator.types.reasons import Reason

NODE_RESOURCES = frozenset({CPU, MEMORY, PODS, "ephemeral-storage"})
"""Resources that every node has; others are devices."""
NAMED_MAX = 3
"""Resources, labels or taints named by a message."""
_OUT = ("unschedulable", "not-ready", "unreachable", "out-of-service")
"""Suffixes of the taints that Kubernetes sets on nodes that are cordoned or not available."""
_OUT_TOLERATIONS = [
    {"key": key, "operator": "Exists"} for key in (*(f"node.kubernetes.io/{why}" for why in _OUT), PROBATION)
]
"""Tolerations of taints that go by themselves."""


def unsatisfiable(inventory: Inventory, request: GangRequest) -> Unschedulable | None:
    """Return why a gang can never be placed on these nodes; None if it could be."""
    kept: dict[Any, Unschedulable | None] = inventory.memo.setdefault("unsatisfiable", {})
    key = request.requests, request.constraints, request.workers, request.devices, request.topology.model_dump_json()
    if key not in kept:
        if len(kept) >= REMEMBERED_MAX:
            kept.clear()
        kept[key] = unplaceable_worker(inventory, request) or _gang(inventory, request)
    return kept[key]


def unplaceable_worker(inventory: Inventory, request: GangRequest) -> Unschedulable | None:
    """Return why not even one worker can ever be placed on these nodes; None if one could be."""
    if not inventory.names:
        return Unschedulable(
            reason=Reason.WAITING_FOR_NODES, message="the cluster has no nodes", lacking=request.workers
        )
    refused = _absent_resource(inventory, request) or _no_node_accepted(inventory, request)
    return refused or _too_large(inventory, request)


def _absent_resource(inventory: Inventory, request: GangRequest) -> Unschedulable | None:
    capacity = {resource: int(inventory.capacity_NR[:, at].max()) for at, resource in enumerate(inventory.resources)}
    for resource, amount in request.requests:
        if amount > 0 and not capacity.get(resource):
            there = [name for name, most in capacity.items() if most and name not in NODE_RESOURCES]
            others = f"; nodes have {', '.join(there[:NAMED_MAX])}" if there else ""
            message = f"no node has {resource}, and each worker needs {amount_of(resource, amount)}{others}"
            return Unschedulable(reason=Reason.WAITING_FOR_NODES, message=message, lacking=request.workers)
    return None


def _no_node_accepted(inventory: Inventory, request: GangRequest) -> Unschedulable | None:
    asked, nodes = request.constraints, counted(len(inventory.names), "node")
    by_labels_N = selected_N(inventory, Constraints(node_selector=asked.node_selector))
    by_both_N = selected_N(inventory, asked)
    if (by_both_N & tolerated_N(inventory, tolerating_outages(asked))).any():
        return None
    if not by_labels_N.any():
        labels = ", ".join(f"{key}={value}" for key, value in asked.node_selector[:NAMED_MAX])
        message = f"none of {nodes} matches the pod template's nodeSelector ({labels})"
    elif not by_both_N.any():
        message = f"none of {nodes} matches the pod template's required node affinity"
    else:
        known = {taint for at in np.unique(inventory.class_N[by_both_N]) for taint in inventory.classes[at].taints}
        taints = sorted(f"{taint.key}={taint.value}:{taint.effect}" for taint in known)
        matching = counted(int(np.count_nonzero(by_both_N)), "node")
        message = f"the pod template tolerates the taints of none of {matching} ({', '.join(taints[:NAMED_MAX])})"
    return Unschedulable(reason=Reason.WAITING_FOR_NODES, message=message, lacking=request.workers)


def _too_large(inventory: Inventory, request: GangRequest) -> Unschedulable | None:
    """Measure a worker by the nodes that it selects; taints may go."""
    of_N = selected_N(inventory, request.constraints)
    for resource, amount in request.requests:
        column = inventory.column(resource)
        largest = 0 if column is None else int(inventory.capacity_NR[of_N, column].max())
        if largest < amount:
            message = (
                f"a worker needs {amount_of(resource, amount)}; the largest node has {amount_of(resource, largest)}; "
                "ask for less in each worker"
            )
            return Unschedulable(reason=Reason.MISCONFIGURED, message=message, lacking=request.workers)
    if room_N(inventory, request.requests, empty=True)[of_N].any():
        return None
    wants = ", ".join(amount_of(resource, amount) for resource, amount in request.requests if resource != PODS)
    message = f"no node has all that a worker needs, {wants}; ask for less in each worker"
    return Unschedulable(reason=Reason.MISCONFIGURED, message=message, lacking=request.workers)


def _gang(inventory: Inventory, request: GangRequest) -> Unschedulable | None:
    """Place the gang as if all nodes were empty, in service and without taints."""
    tree = tree_of(inventory)
    requested = topology_request_of(inventory, tree, request)
    if isinstance(requested, Unschedulable):
        return requested
    labelled_N = (inventory.domain_LN >= 0).all(axis=0)
    every_N: RowArray = room_N(inventory, request.requests, empty=True)
    every_N[~labelled_N] = 0
    slots_N = np.where(selected_N(inventory, request.constraints), every_N, 0).astype(every_N.dtype)
    rooms = rooms_of(tree, requested, slots_N)
    if smallest_domain(tree, requested, rooms, request.workers) is not None:
        return None
    have = int(slots_N.sum())
    if have >= request.workers:
        return _lacking_domain(inventory, requested, request, rooms)
    if int(every_N.sum()) >= request.workers:
        out, of = int(np.count_nonzero(every_N - slots_N)), counted(int(np.count_nonzero(every_N)), "node")
        message = (
            f"needs {counted(request.workers, 'worker')}; room for {have} when nothing else runs there; "
            f"of {of} that could hold a worker {out} do not bear the labels that the pod template selects"
        )
        return Unschedulable(reason=Reason.WAITING_FOR_NODES, message=message, lacking=request.workers - have)
    per_worker, what = max(1, request.devices), "device" if request.devices else "worker"
    holding = counted(int(np.count_nonzero(slots_N)), "node")
    message = f"needs {counted(request.workers * per_worker, what)}; room for {have * per_worker} on {holding}"
    if have:
        message += " when nothing else runs there"
    if not labelled_N.all():
        message += f"; {counted(int(np.count_nonzero(~labelled_N)), 'node')} without the labels of the topology"
    return Unschedulable(reason=Reason.WAITING_FOR_CAPACITY, message=message, lacking=request.workers - have)


def _lacking_domain(
    inventory: Inventory, requested: TopologyRequest, request: GangRequest, rooms: Rooms
) -> Unschedulable:
    tree = tree_of(inventory)
    slices = ""
    if requested.slice_workers > 1:
        slices = f" in slices of {requested.slice_workers}, each in one {level_name(tree, requested.slice_depth)}"
    have, where = rooms.cluster, "in the cluster"
    domain = ""
    if requested.required is not None:
        room_D = rooms.by_depth[requested.required]
        nearest = int(np.argmax(room_D))
        have, where = int(room_D[nearest]), f"in {tree.levels[requested.required].names[nearest]}"
        domain = f" in one {level_name(tree, requested.required)}"
    message = f"needs {counted(request.workers, 'worker')}{domain}{slices}; room for {have} {where} when it is empty"
    return Unschedulable(reason=Reason.WAITING_FOR_TOPOLOGY, message=message, lacking=request.workers - have)


def tolerating_outages(asked: Constraints) -> str:
    """Return a template's tolerations and those of the taints that Kubernetes puts on nodes out of service."""
    return _with(asked, _OUT_TOLERATIONS)


def accepting_probation(asked: Constraints) -> str:
    """Return a template's tolerations as they would be if its job accepted nodes in probation."""
    return _with(asked, [{"key": PROBATION, "operator": "Exists"}])


def _with(asked: Constraints, more: list[dict[str, str]]) -> str:
    given = json.loads(asked.tolerations) if asked.tolerations else []
    return json.dumps([*given, *more])


def counted(number: int, what: str) -> str:
    """Write a number of things."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def amount_of(resource: str, amount: int) -> str:
    """Write an amount of a resource in its usual unit."""
    if resource == CPU:
        return f"{amount / 1000:g} cpu"
    if resource in {MEMORY, "ephemeral-storage"}:
        return f"{amount / 2**30:.1f} GiB of {resource}"
    return f"{amount} {resource}"
