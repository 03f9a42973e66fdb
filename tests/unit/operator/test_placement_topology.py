"""Labels of nodes become domains; labels that do not make sense become problems with names."""

import numpy as np
import pytest

from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.placement.topology import ProblemReason, arrange, distances
from polyreme_operator.types.inventory import HOST_LEVEL, LevelView
from polyreme_operator.types.views import NodeView
from tests.unit.operator.placement_scenes import LEVELS, labels_of


def test_nodes_lie_by_domain_then_by_name() -> None:
    names = ["b1/r0/h0", "b0/r1/h1", "b0/r0/h1", "b0/r1/h0", "b0/r0/h0"]
    found = arrange({name: labels_of(name) for name in names}, LEVELS)
    assert found.names == ("b0/r0/h0", "b0/r0/h1", "b0/r1/h0", "b0/r1/h1", "b1/r0/h0")
    assert found.levels == ("block", "rack", HOST_LEVEL)
    assert found.domain_LN.tolist() == [[0, 0, 0, 0, 1], [0, 0, 1, 1, 2], [0, 1, 2, 3, 4]]
    assert found.domain_names == (("b0", "b1"), ("b0-r0", "b0-r1", "b1-r0"), found.names)
    assert found.problems == ()


def test_without_a_topology_there_are_hosts() -> None:
    found = arrange({"b": {}, "a": {}}, ())
    assert (found.names, found.levels, found.domain_LN.tolist()) == (("a", "b"), (HOST_LEVEL,), [[0, 1]])
    assert found.problems == ()


def test_a_rack_under_two_blocks_is_two_domains_and_a_problem() -> None:
    nodes = {
        "n0": {"net/block": "b0", "net/rack": "r0"},
        "n1": {"net/block": "b1", "net/rack": "r0"},
        "n2": {"net/block": "b1", "net/rack": "r1"},
    }
    found = arrange(nodes, LEVELS)
    assert found.domain_names[1] == ("b0/r0", "b1/r0", "r1")
    (problem,) = found.problems
    assert problem.reason is ProblemReason.LABELS_DO_NOT_NEST
    assert "rack r0 lies in blocks b0, b1" in problem.message
    assert "net/rack" in problem.message


def test_nodes_without_labels_come_last_and_are_named() -> None:
    nodes = {"a": {"net/block": "b0"}, "z": labels_of("b0/r0/z"), "c": {}}
    found = arrange(nodes, LEVELS)
    assert found.names == ("z", "a", "c")
    assert found.unlabelled == ("a", "c")
    assert found.domain_LN.tolist() == [[0, -1, -1], [0, -1, -1], [0, 1, 2]]
    (problem,) = found.problems
    assert problem.reason is ProblemReason.NODES_WITHOUT_LABELS
    assert problem.message == "2 of 3 nodes lack net/block, net/rack and take no gangs: a, c; label them"


def test_many_problems_are_counted_rather_than_listed() -> None:
    found = arrange({f"n{at}": {} for at in range(9)}, LEVELS)
    assert "n0, n1, n2, n3, n4 and 4 more" in found.problems[0].message
    torn = {f"{block}{at}": {"net/block": block, "net/rack": f"r{at}"} for at in range(7) for block in "xy"}
    assert "and 2 more" in arrange(torn, LEVELS).problems[0].message


def test_no_nodes_is_a_problem() -> None:
    found = arrange({}, LEVELS)
    assert [problem.reason for problem in found.problems] == [ProblemReason.NO_NODES]
    assert found.domain_LN.shape == (3, 0)


def test_a_level_of_hosts_in_the_topology_is_the_last_one_once() -> None:
    host = LevelView(name="node", node_label=HOST_LEVEL, distance=2)
    found = arrange({"n0": labels_of("b0/r0/n0")}, (*LEVELS, host))
    assert found.levels == ("block", "rack", HOST_LEVEL)
    assert found.distance_L.tolist() == [32, 8, 2]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ((None, None, None), [16, 4, 1]),
        ((100, None, None), [100, 4, 1]),
        ((None, 3, None), [12, 3, 1]),
        ((2, 5, None), [5, 5, 1]),
        ((None, None, 0), [16, 4, 1]),
    ],
)
def test_distances_never_fall_upwards(asked: tuple[int | None, ...], expected: list[int]) -> None:
    found = distances([LevelView(name="", node_label="", distance=distance) for distance in asked])
    assert found.dtype == np.int64
    assert found.tolist() == expected


def test_any_number_of_resources_is_counted_node_by_node() -> None:
    resources = [f"example.com/r{at:02d}" for at in range(40)]
    table = NodeTable()
    for name in ("n0", "n1"):
        table.put(NodeView(name=name, host=name, allocatable=tuple((resource, 9) for resource in resources)))
    for at, resource in enumerate(resources):
        table.add("n0" if at % 2 else "n1", ((resource, at),), 1, busy=False)
    inventory = table.snapshot()
    used = {name: inventory.used_NR[row].tolist() for row, name in enumerate(inventory.names)}
    assert used == {
        "n0": [at if at % 2 else 0 for at in range(40)],
        "n1": [0 if at % 2 else at for at in range(40)],
    }
