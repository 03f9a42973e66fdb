"""What holds of every placement, and, on clusters small enough to try everything, that none is better."""

import dataclasses
import itertools
import operator
from collections import Counter
from typing import Any

import numpy as np
from hypothesis import assume, example, given, settings
from hypothesis import strategies as st

from polyreme_operator.placement.metric import metric_of
from polyreme_operator.placement.place import charge, place
from polyreme_operator.placement.risk import avoided_risks
from polyreme_operator.placement.traffic import cost_of, traffic_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import GangRequest, Inventory, Placed, Unschedulable
from polyreme_operator.types.reasons import Reason
from polyreme_planner.layout import Layout
from polyreme_planner.traffic_volume import GroupVolume
from tests.unit.operator import placement_oracle as oracle
from tests.unit.operator.placement_scenes import cluster, gang

LEVEL = st.sampled_from([None, "block", "rack", "kubernetes.io/hostname"])
HOSTS = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 1), st.integers(0, 3), st.booleans(), st.integers(0, 9)),
    min_size=1,
    max_size=6,
)
FOUR_PLAIN: dict[str, Any] = {"workers": 4, "required": None, "sliced": None, "size": 1, "exclusive": None}
AXES = ("tp", "cp", "dp", "pp", "ep", "edp")


def built(hosts: list[tuple[int, int, int, bool, int]]) -> Inventory:
    free = {f"b{block}/r{rack}/h{at}": slots for at, (block, rack, slots, _, _) in enumerate(hosts)}
    names = list(free)
    return cluster(
        free,
        capacity=3,
        busy=[name for name, host in zip(names, hosts, strict=True) if host[4] == 9],
        out=[name for name, host in zip(names, hosts, strict=True) if host[3] and host[4] > 5],
        risk={name: host[4] / 10 for name, host in zip(names, hosts, strict=True)},
    )


def asked(workers: int, required: str | None, sliced: str | None, size: int, exclusive: str | None) -> GangRequest:
    fields: dict[str, Any] = {"required": required, "exclusive": exclusive}
    if sliced is not None:
        fields |= {"slice_level": sliced, "slice_size": size}
    return gang(workers, devices=1, **fields)


@given(
    hosts=HOSTS,
    workers=st.integers(1, 6),
    required=LEVEL,
    sliced=LEVEL,
    size=st.integers(1, 3),
    exclusive=st.sampled_from([None, None, "rack", "block"]),
)
@settings(max_examples=400)
def test_a_gang_is_placed_exactly_when_it_can_be_and_as_near_as_it_can_be(
    hosts: list[tuple[int, int, int, bool, int]],
    workers: int,
    required: str | None,
    sliced: str | None,
    size: int,
    exclusive: str | None,
) -> None:
    inventory = built(hosts)
    request = asked(workers, required, sliced, size, exclusive)
    possible = list(oracle.divisions(inventory, request))
    found = place(inventory, request)
    if isinstance(found, Unschedulable):
        assert found.reason is Reason.MISCONFIGURED or not possible, found.message
        return
    counts = tuple(np.bincount(found.rows_W, minlength=len(hosts)).tolist())
    assert counts in possible
    depth = oracle.smallest_depth(inventory, counts)
    assert depth == max(oracle.smallest_depth(inventory, other) for other in possible)
    assert found.level == ("" if depth == oracle.CLUSTER else inventory.levels[depth])
    if sliced is not None:
        at = inventory.levels.index(sliced)
        slices = inventory.domain_LN[at, found.rows_W].reshape(-1, size)
        assert (slices == slices[:, :1]).all()
    # Inside the chosen domain no choice touches fewer domains of the level below.
    if depth + 1 < len(inventory.levels):
        home = oracle.domain(inventory, depth, int(found.rows_W[0]))
        inside = [
            other
            for other in possible
            if all(oracle.domain(inventory, depth, row) == home for row, count in enumerate(other) if count)
        ]
        assert oracle.spans(inventory, counts, depth + 1) == min(
            oracle.spans(inventory, other, depth + 1) for other in inside
        )


@given(
    hosts=HOSTS,
    workers=st.integers(1, 6),
    required=LEVEL,
    sliced=LEVEL,
    size=st.integers(1, 3),
    exclusive=st.sampled_from([None, None, "rack", "block"]),
)
@example(hosts=[(0, 0, free, False, risk) for free, risk in ((1, 0), (1, 0), (2, 0), (2, 2))], **FOUR_PLAIN)
@example(hosts=[(0, 0, 2, False, 1), (0, 0, 2, False, 1), *[(0, 1, 1, False, 0)] * 4], **FOUR_PLAIN)
@settings(max_examples=400)
def test_a_gang_avoids_risky_nodes_exactly_where_that_spreads_it_no_wider(
    hosts: list[tuple[int, int, int, bool, int]],
    workers: int,
    required: str | None,
    sliced: str | None,
    size: int,
    exclusive: str | None,
) -> None:
    inventory = built(hosts)
    request = asked(workers, required, sliced, size, exclusive)
    found = place(inventory, request)
    plain = place(dataclasses.replace(inventory, risk_N=np.zeros_like(inventory.risk_N)), request)
    if isinstance(found, Unschedulable) or isinstance(plain, Unschedulable):
        assert type(found) is type(plain)
        return
    chosen, without = (tuple(np.bincount(each.rows_W, minlength=len(hosts)).tolist()) for each in (found, plain))
    depth, levels = oracle.smallest_depth(inventory, without), range(len(inventory.levels))
    most = [oracle.spans(inventory, without, level) for level in levels]

    def no_wider(counts: tuple[int, ...]) -> bool:
        spans = [oracle.spans(inventory, counts, level) for level in levels]
        return oracle.smallest_depth(inventory, counts) == depth and all(map(operator.le, spans, most))

    assert no_wider(chosen)
    risky = inventory.risk_N >= avoided_risks(workers)[0]
    # Above a rack the choice of racks decides how many hosts there are, and not all choices are tried.
    if depth >= inventory.levels.index("rack"):
        calm = any(
            no_wider(other) and not risky[np.array(other) > 0].any() for other in oracle.divisions(inventory, request)
        )
        assert calm == (not risky[np.array(chosen) > 0].any())


@given(
    hosts=HOSTS,
    gangs=st.lists(st.tuples(st.integers(1, 5), LEVEL, st.sampled_from([1, 2])), max_size=6),
)
@settings(max_examples=150)
def test_gangs_after_gangs_never_take_more_than_there_is(
    hosts: list[tuple[int, int, int, bool, int]], gangs: list[tuple[int, str | None, int]]
) -> None:
    inventory = built(hosts)
    before = inventory.used_NR.copy()
    held: list[tuple[GangRequest, Placed]] = []
    for workers, required, devices in gangs:
        request = gang(workers, devices=devices, required=required)
        untouched = inventory.used_NR.copy()
        found = place(inventory, request)
        assert (inventory.used_NR == untouched).all()
        if isinstance(found, Placed):
            assert len(found.rows_W) == workers
            assert inventory.usable_N[found.rows_W].all()
            charge(inventory, request, found.rows_W)
            held.append((request, found))
        assert (inventory.used_NR <= inventory.capacity_NR).all()
    for request, found in held:
        charge(inventory, request, found.rows_W, sign=-1)
    assert (inventory.used_NR == before).all()


@given(data=st.data())
@settings(max_examples=60)
def test_equal_clusters_give_equal_places(data: st.DataObject) -> None:
    """In whatever order the nodes became known."""
    request = data.draw(trafficked(workers_max=12))
    inventory = scattered(data.draw, request)
    free = {
        name: int(inventory.capacity_NR[row, 0] - inventory.used_NR[row, 0]) for name, row in inventory.rows.items()
    }
    names = data.draw(st.permutations(list(free)))
    again = cluster({name: free[name] for name in names}, capacity=3 * request.devices)
    found, same = place(inventory, request), place(again, request)
    assert isinstance(found, Placed)
    assert isinstance(same, Placed)
    assert found.rows_W.tolist() == same.rows_W.tolist()
    assert found.cost == same.cost


@st.composite
def trafficked(draw: st.DrawFn, *, workers_max: int) -> GangRequest:
    """A gang with a layout that fits, whatever it cuts through, and volumes of some axes."""
    pp, dp, cp, tp = (draw(st.sampled_from((1, 2, 3, 4))) for _ in range(4))
    world = pp * dp * cp * tp
    devices = draw(st.sampled_from([count for count in range(1, 13) if world % count == 0]))
    workers = world // devices
    assume(2 <= workers <= workers_max)
    ep = draw(st.sampled_from([count for count in range(1, dp * cp * tp + 1) if dp * cp * tp % count == 0]))
    layout = Layout(dp=dp, ep=ep, pp=pp, cp=cp, tp=tp)
    axes = draw(st.lists(st.sampled_from(AXES), unique=True, min_size=1))
    volumes = tuple(
        GroupVolume(axis=axis, ranks=getattr(layout, axis), bytes_per_rank=draw(st.integers(0, 10**13)), messages=1)
        for axis in axes
    )
    return dataclasses.replace(gang(workers, devices=devices, cpu=0), layout=layout, volumes=volumes)


def scattered(draw: Any, request: GangRequest) -> Inventory:
    """A cluster with room for the gang in odd places."""
    hosts = draw(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 1), st.integers(1, 3)), min_size=1, max_size=24))
    free = {f"b{b}/r{r}/h{at:02d}": slots * request.devices for at, (b, r, slots) in enumerate(hosts)}
    assume(sum(free.values()) >= request.workers * request.devices)
    return cluster(free, capacity=3 * request.devices)


@given(data=st.data())
@settings(max_examples=300)
def test_the_cost_is_bytes_times_distance_and_never_above_by_rank(data: st.DataObject) -> None:
    request = data.draw(trafficked(workers_max=24))
    inventory = scattered(data.draw, request)
    found = place(inventory, request)
    assert isinstance(found, Placed)
    assert found.cost == oracle.cost(inventory, request, found.rows_W.tolist())
    assert found.cost <= oracle.cost(inventory, request, sorted(found.rows_W.tolist()))
    budget = data.draw(st.integers(0, 5000))
    hurried = place(inventory, request, work_units=budget)
    assert isinstance(hurried, Placed)
    assert hurried.cost <= oracle.cost(inventory, request, sorted(found.rows_W.tolist()))
    assert sorted(hurried.rows_W.tolist()) == sorted(found.rows_W.tolist())


@given(data=st.data())
@settings(max_examples=100)
def test_orders_of_small_gangs_are_the_best_there_are(data: st.DataObject) -> None:
    request = data.draw(trafficked(workers_max=6))
    inventory = scattered(data.draw, request)
    found = place(inventory, request)
    assert isinstance(found, Placed)
    metric, traffic = metric_of(tree_of(inventory), np.sort(found.rows_W)), traffic_of(request)
    assert metric is not None
    orders = itertools.permutations(range(request.workers))
    assert found.cost == min(cost_of(traffic, metric, np.array(order)) for order in orders)


@given(data=st.data())
@settings(max_examples=60)
def test_slices_stay_together_whatever_talks(data: st.DataObject) -> None:
    request = data.draw(trafficked(workers_max=24))
    sizes = [size for size in (2, 3, 4) if request.workers % size == 0]
    assume(sizes)
    size = data.draw(st.sampled_from(sizes))
    topology = request.topology.model_copy(update={"slice_size": size, "slice_level": "rack"})
    request = dataclasses.replace(request, topology=topology)
    inventory = scattered(data.draw, request)
    found = place(inventory, request)
    if isinstance(found, Unschedulable):
        return
    racks = inventory.domain_LN[1, found.rows_W].reshape(-1, size)
    assert (racks == racks[:, :1]).all()
    on_node = Counter(found.rows_W.tolist())
    room = (inventory.capacity_NR[:, 0] - inventory.used_NR[:, 0]) // request.devices
    assert all(count <= room[row] for row, count in on_node.items())
