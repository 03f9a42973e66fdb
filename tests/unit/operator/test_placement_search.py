"""The search's own books: gains of swaps are true, swaps of one round do not disturb each other, packing pays."""

import dataclasses

import numpy as np

from polyreme_operator.placement.metric import metric_of
from polyreme_operator.placement.place import place
from polyreme_operator.placement.search import improve
from polyreme_operator.placement.topology import arrange
from polyreme_operator.placement.traffic import cost_of, graph_of, traffic_of
from polyreme_operator.placement.tree import tree_of
from polyreme_operator.types.inventory import GangRequest, LevelView, Placed, RowArray
from polyreme_planner.layout import Layout
from polyreme_planner.traffic_volume import GroupVolume
from tests.unit.operator import placement_oracle as oracle
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
    traffic = traffic_of(request)
    metric, graph = metric_of(tree_of(inventory), np.arange(120, dtype=np.int32)), graph_of(traffic)
    assert metric is not None
    place_W = np.random.default_rng(1).permutation(120)
    costs = []
    for work_units in range(10_000, 200_000, 10_000):
        found_W, spent = improve(metric, graph, place_W, work_units=work_units)
        assert sorted(found_W.tolist()) == list(range(120))
        assert spent <= work_units
        costs.append(cost_of(traffic, metric, found_W))
    assert costs == sorted(costs, reverse=True)
    assert costs[-1] < cost_of(traffic, metric, place_W) // 2


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


def test_the_metric_of_a_gang_is_the_trees_distance() -> None:
    inventory = cluster({name: 2 for at, name in enumerate(grid(3, 4, 5)) if at % 7}, capacity=2)
    slots_S = np.sort(np.random.default_rng(2).integers(0, len(inventory.names), 40)).astype(np.int32)
    metric = metric_of(tree_of(inventory), slots_S)
    assert metric is not None
    for each in (metric, metric.tabled()):
        found_SS = each.between(each.code_S[:, None], each.code_S[None, :])
        assert found_SS.tolist() == [[oracle.distance(inventory, *pair) for pair in row] for row in pairs(slots_S)]


def pairs(slots_S: RowArray) -> list[list[tuple[int, int]]]:
    return [[(one, other) for other in slots_S.tolist()] for one in slots_S.tolist()]


def test_ranks_are_not_searched_in_a_tree_whose_codes_would_be_too_long() -> None:
    """Nine levels, each with one domain of 128 children: 1,144 nodes need 7 bits a level."""
    depths, fan = 9, 128
    labels = {f"n{at // fan}-{at % fan:03}": at // fan for at in range(depths * fan)}
    levels = [LevelView(name=f"l{depth}", node_label=f"l{depth}") for depth in range(depths - 1)]
    arrangement = arrange(
        {
            name: {f"l{depth}": "a" if depth < parts else name for depth in range(depths - 1)}
            for name, parts in labels.items()
        },
        levels,
    )
    inventory = cluster(dict.fromkeys(arrangement.names, 1), capacity=1, arrangement=arrangement)
    request = talking(8 * 128, pp=1, ep=2)
    assert metric_of(tree_of(inventory), np.arange(8 * 128, dtype=np.int32)) is None
    found = place(inventory, request)
    assert isinstance(found, Placed)
    assert found.rows_W.tolist() == sorted(found.rows_W.tolist())
    assert found.cost == 0
