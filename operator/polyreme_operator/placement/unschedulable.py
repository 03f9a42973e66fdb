"""Explains why a gang does not fit and what would let it run, with numbers and the domain that came nearest.

Shape suffixes: N nodes, D domains of one level.
"""

from __future__ import annotations

import numpy as np

from polyreme_operator.placement.domains import Rooms
from polyreme_operator.placement.eligible import accepted_N, room_N, selected_N, tolerated_N
from polyreme_operator.placement.topology_request import TopologyRequest, level_name
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.placement.unsatisfiable import (
    NODE_RESOURCES,
    accepting_probation,
    counted,
    tolerating_outages,
    unplaceable_worker,
)
from polyreme_operator.types.inventory import BoolArray, GangRequest, Inventory, Unschedulable
from polyreme_operator.types.reasons import Reason


def unschedulable_because(
    inventory: Inventory, requested: TopologyRequest, request: GangRequest, rooms: Rooms, barred_N: BoolArray
) -> Unschedulable:
    """Explain a refusal.

    Args:
        inventory: The nodes.
        requested: What is asked of the topology.
        request: What is asked of the nodes.
        rooms: The room there is.
        barred_N: Nodes that are free but held for others.
    """
    never = unplaceable_worker(inventory, request)
    if never is not None:
        return never
    lacking_nodes = _lacking_nodes(inventory, request, rooms, barred_N)
    if lacking_nodes is not None:
        return lacking_nodes
    if int(rooms.slots_N.sum()) < request.workers:
        return _lacking_capacity(inventory, request, rooms, barred_N)
    return _lacking_nearness(inventory, requested, request, rooms)


def _lacking_nodes(
    inventory: Inventory, request: GangRequest, rooms: Rooms, barred_N: BoolArray
) -> Unschedulable | None:
    """Explain that enough devices are free, but the template's other requirements exclude too many nodes."""
    devices = tuple(pair for pair in request.requests if pair[0] not in NODE_RESOURCES)
    by_devices_N = room_N(inventory, devices or request.requests)
    by_devices_N[~inventory.usable_N | barred_N] = 0
    have = int(rooms.slots_N.sum())
    if have >= request.workers or int(by_devices_N.sum()) < request.workers:
        return None
    free_N = by_devices_N > 0
    selected = selected_N(inventory, request.constraints)
    tolerated = tolerated_N(inventory, request.constraints.tolerations)
    proven = tolerated_N(inventory, accepting_probation(request.constraints)) & ~tolerated
    taken = [
        (int(np.count_nonzero(free_N & ~selected)), "do not bear the labels that the pod template selects"),
        (
            int(np.count_nonzero(free_N & selected & ~tolerated & ~proven)),
            "have taints that the pod template does not tolerate",
        ),
        (
            int(np.count_nonzero(free_N & selected & proven)),
            "are in probation after a fault, and only jobs with acceptProbation use them",
        ),
    ]
    left_N = free_N & selected & tolerated
    for resource, amount in request.requests:
        if resource in NODE_RESOURCES:
            short = int(np.count_nonzero(left_N & (room_N(inventory, ((resource, amount),)) < by_devices_N)))
            taken.append((short, f"have too little {resource} left for all workers that their devices would hold"))
    words = "; ".join(f"{count} {what}" for count, what in taken if count)
    free = counted(int(np.count_nonzero(free_N)), "node")
    message = f"needs {counted(request.workers, 'worker')}; room for {have}; of {free} with free devices {words}"
    return Unschedulable(reason=Reason.WAITING_FOR_NODES, message=message, lacking=request.workers - have)


def _lacking_capacity(inventory: Inventory, request: GangRequest, rooms: Rooms, barred_N: BoolArray) -> Unschedulable:
    have, holding = int(rooms.slots_N.sum()), int(np.count_nonzero(rooms.slots_N))
    per_worker = max(1, request.devices)
    what = "device" if request.devices else "worker"
    needs = counted(request.workers * per_worker, what)
    message = f"needs {needs}; room for {have * per_worker} on {counted(holding, 'node')}"
    accepted = accepted_N(inventory, request.constraints)
    out = int(np.count_nonzero(_out_of_service_N(inventory, request)))
    held_N = accepted & inventory.usable_N & barred_N & (room_N(inventory, request.requests) > 0)
    kept_N = np.zeros_like(held_N) if inventory.spare_N is None else held_N & inventory.spare_N
    kept, held = int(np.count_nonzero(kept_N)), int(np.count_nonzero(held_N & ~kept_N))
    if out:
        message += f"; {_are(out, 'node')} out of service"
    if held:
        message += f"; {_are(held, 'free node')} held for others"
    if kept:
        message += f"; {_are(kept, 'free node')} kept as {'a spare' if kept == 1 else 'spares'}"
    return Unschedulable(reason=Reason.WAITING_FOR_CAPACITY, message=message, lacking=request.workers - have)


def _lacking_nearness(
    inventory: Inventory, requested: TopologyRequest, request: GangRequest, rooms: Rooms
) -> Unschedulable:
    """Explain that enough is free, but not within one domain."""
    tree = tree_of(inventory)
    most = int(rooms.slots_N.max(initial=0))
    what = "node" if most <= 1 else "worker"
    slices = ""
    if requested.slice_workers > 1:
        slices = f" in slices of {requested.slice_workers}, each in one {level_name(tree, requested.slice_depth)}"
    if requested.required is None:
        have = rooms.cluster
        message = f"needs {counted(request.workers, what)}{slices}; {have} free so"
        return Unschedulable(reason=Reason.WAITING_FOR_TOPOLOGY, message=message, lacking=request.workers - have)
    level = tree.levels[requested.required]
    room_D = rooms.by_depth[requested.required]
    nearest = int(np.argmax(room_D))
    have = int(room_D[nearest])
    rows = slice(int(level.start_D[nearest]), int(level.end_D[nearest]))
    out = int(np.count_nonzero(_out_of_service_N(inventory, request)[rows]))
    message = (
        f"needs {counted(request.workers, what)} in one {level_name(tree, requested.required)}{slices}; "
        f"{have} free in {level.names[nearest]}"
    )
    if out:
        message += f"; {out} of its nodes quarantined, cordoned or not ready"
    if inventory.spare_N is not None and (kept := int(np.count_nonzero(inventory.spare_N[rows]))):
        message += f"; {kept} of its nodes {'is kept as a spare' if kept == 1 else 'are kept as spares'}"
    return Unschedulable(reason=Reason.WAITING_FOR_TOPOLOGY, message=message, lacking=request.workers - have)


def _out_of_service_N(inventory: Inventory, request: GangRequest) -> BoolArray:
    """Return the nodes that could hold a worker if they were in service."""
    asked = request.constraints
    tolerated = tolerated_N(inventory, tolerating_outages(asked))
    would_N = room_N(inventory, request.requests, empty=True) > 0
    out_N: BoolArray = would_N & selected_N(inventory, asked) & tolerated & ~inventory.usable_N
    return out_N


def _are(number: int, what: str) -> str:
    return f"{counted(number, what)} {'is' if number == 1 else 'are'}"
