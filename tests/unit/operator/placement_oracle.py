"""Placement by trying everything, written from the rules' words: what the fast code is held to on small cases."""

import itertools
from collections import Counter
from collections.abc import Iterator
from fractions import Fraction

from polyreme_operator.types.inventory import GangRequest, Inventory
from polyreme_planner.layout import Layout

CLUSTER = -1


def depth_of(inventory: Inventory, level: str | None) -> int | None:
    return None if level is None else inventory.levels.index(level)


def domain(inventory: Inventory, depth: int, row: int) -> int:
    return 0 if depth == CLUSTER else int(inventory.domain_LN[depth, row])


def free_slots(inventory: Inventory, request: GangRequest) -> list[int]:
    """Workers that each node holds by devices, in clusters without selectors."""
    shared = set()
    exclusive = depth_of(inventory, request.topology.exclusive)
    if exclusive is not None:
        shared = {domain(inventory, exclusive, row) for row, busy in enumerate(inventory.busy_N) if busy}
    return [
        0
        if not inventory.usable_N[row] or (exclusive is not None and domain(inventory, exclusive, row) in shared)
        else int((inventory.capacity_NR[row, 0] - inventory.used_NR[row, 0]) // request.devices)
        for row in range(len(inventory.names))
    ]


def divisions(inventory: Inventory, request: GangRequest) -> Iterator[tuple[int, ...]]:
    """Yield every count of workers by node that the rules allow."""
    slots = free_slots(inventory, request)
    required = depth_of(inventory, request.topology.required)
    slice_depth, size = depth_of(inventory, request.topology.slice_level), request.topology.slice_size
    for counts in itertools.product(*(range(slot + 1) for slot in slots)):
        if sum(counts) != request.workers:
            continue
        used = [row for row, count in enumerate(counts) if count]
        if required is not None and len({domain(inventory, required, row) for row in used}) > 1:
            continue
        if slice_depth is not None and size is not None:
            together: Counter[int] = Counter()
            for row in used:
                together[domain(inventory, slice_depth, row)] += counts[row]
            if any(count % size for count in together.values()):
                continue
        yield counts


def smallest_depth(inventory: Inventory, counts: tuple[int, ...]) -> int:
    """Lowest level with a domain that holds them."""
    used = [row for row, count in enumerate(counts) if count]
    for depth in range(len(inventory.levels) - 1, -1, -1):
        if len({domain(inventory, depth, row) for row in used}) == 1:
            return depth
    return CLUSTER


def spans(inventory: Inventory, counts: tuple[int, ...], depth: int) -> int:
    """Domains of a level that they touch."""
    return len({domain(inventory, depth, row) for row, count in enumerate(counts) if count})


def distance(inventory: Inventory, one: int, other: int) -> int:
    assert inventory.distance_L is not None
    for depth in range(len(inventory.levels)):
        if domain(inventory, depth, one) != domain(inventory, depth, other):
            return int(inventory.distance_L[depth])
    return 0


def groups(layout: Layout, axis: str) -> Iterator[list[int]]:
    """Yield the ranks of each group of an axis, in order, from the meshes' definition."""
    axes = ("pp", "edp", "ep") if axis in {"ep", "edp"} else ("pp", "dp", "cp", "tp")
    degrees = [getattr(layout, name) for name in axes]
    at = axes.index(axis)
    found: dict[tuple[int, ...], list[int]] = {}
    for rank, place in enumerate(itertools.product(*(range(degree) for degree in degrees))):
        found.setdefault((*place[:at], *place[at + 1 :]), []).append(rank)
    yield from found.values()


def cost(inventory: Inventory, request: GangRequest, rows: list[int]) -> int:
    """Bytes x distance, message by message."""
    total = 0
    for volume in request.volumes:
        sent = Fraction(0)
        for ranks in groups(request.layout, volume.axis):
            nodes = [rows[rank // request.devices] for rank in ranks]
            if len(nodes) < 2:
                continue
            if volume.axis == "ep":
                pairs = list(itertools.permutations(nodes, 2))
                share = Fraction(volume.bytes_per_rank, len(nodes) - 1)
            else:
                ring = [*nodes, *([] if volume.axis == "pp" else nodes[:1])]
                pairs, share = list(itertools.pairwise(ring)), Fraction(volume.bytes_per_rank)
            sent += sum((share * distance(inventory, *pair) for pair in pairs), Fraction(0))
        total += int(sent)
    return total
