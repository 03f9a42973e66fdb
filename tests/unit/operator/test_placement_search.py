"""The search's own books: gains of swaps are true, swaps of one round do not disturb each other, packing pays."""

import dataclasses

import numpy as np

from polyreme_operator.placement.place import place
from polyreme_operator.placement.search import improve, metric_of
from polyreme_operator.placement.traffic import cost_of, graph_of, traffic_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import GangRequest, Placed
from polyreme_planner.layout import Layout
from polyreme_planner.traffic_volume import GroupVolume
from tests.unit.operator.placement_scenes import cluster, gang, grid


def talking(workers: int, *, pp: int, ep: int) -> GangRequest:
    layout = Layout(dp=workers // pp, ep=ep, pp=pp)
    volumes = tuple(
        GroupVolume(axis=axis, ranks=getattr(layout, axis), bytes_per_rank=sent, messages=1)
        for axis, sent in (("ep", 1000), ("dp", 90), ("pp", 7))
    )
    return dataclasses.replace(gang(workers, devices=1), layout=layout, volumes=volumes)


def test_every_swap_of_the_search_pays_what_it_says() -> None:
    inventory, request = cluster(grid(3, 5, 8, free=1), capacity=1), talking(120, pp=4, ep=2)
    tree, traffic = tree_of(inventory), traffic_of(request)
    slots_S = np.arange(120, dtype=np.int32)
    metric, graph = metric_of(tree, slots_S), graph_of(traffic)
    assert metric is not None
    place_W = np.random.default_rng(1).permutation(120)
    costs = []
    for work_units in range(10_000, 200_000, 10_000):
        found_W, spent = improve(metric, graph, place_W, work_units=work_units)
        assert sorted(found_W.tolist()) == list(range(120))
        assert spent <= work_units
        costs.append(cost_of(tree, traffic, slots_S[found_W]))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < cost_of(tree, traffic, slots_S[place_W]) // 2


def test_groups_are_packed_whole_into_racks() -> None:
    inventory, request = cluster(grid(1, 24, 3, free=1), capacity=1), talking(72, pp=1, ep=2)
    found = place(inventory, request, work_units=4 * traffic_of(request).lookups)
    assert isinstance(found, Placed)
    racks = inventory.domain_LN[1, found.rows_W].reshape(-1, 2)
    assert int((racks[:, 0] == racks[:, 1]).sum()) == 24


def test_slices_of_small_gangs_stay_together_against_what_they_say() -> None:
    inventory = cluster(grid(1, 2, 2, free=1), capacity=1)
    request = dataclasses.replace(
        talking(4, pp=2, ep=1), volumes=(GroupVolume(axis="pp", ranks=2, bytes_per_rank=9, messages=1),)
    )
    apart = place(inventory, request)
    topology = request.topology.model_copy(update={"slice_size": 2, "slice_level": "rack"})
    found = place(inventory, dataclasses.replace(request, topology=topology))
    assert isinstance(found, Placed)
    assert isinstance(apart, Placed)
    assert inventory.domain_LN[1, apart.rows_W].tolist() in ([0, 1, 0, 1], [1, 0, 1, 0])
    assert inventory.domain_LN[1, found.rows_W].tolist() == [0, 0, 1, 1]
