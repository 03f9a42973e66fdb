"""Required, preferred, slices, exclusive, best fit, and what is reported when a gang does not fit."""

import dataclasses
from collections import Counter
from typing import Any

import numpy as np
import pytest

from polyreme_operator.placement.place import charge, place
from polyreme_operator.types.inventory import (
    HOST_LEVEL,
    Constraints,
    Inventory,
    LevelView,
    Placed,
    Taint,
    Unschedulable,
)
from polyreme_operator.types.reasons import Reason
from tests.unit.operator.placement_scenes import cluster, gang, grid


def nodes(inventory: Inventory, found: Placed | Unschedulable) -> list[str]:
    assert isinstance(found, Placed), found
    return [inventory.names[row] for row in found.rows_W]


def unschedulable(inventory: Inventory, **fields: Any) -> Unschedulable:
    found = place(inventory, gang(**fields))
    assert isinstance(found, Unschedulable), found
    return found


@pytest.mark.parametrize(
    ("workers", "level", "domain"),
    [(1, HOST_LEVEL, "b0/r0/h00"), (4, "rack", "b0-r0"), (5, "block", "b0"), (12, "block", "b0"), (13, "", "")],
)
def test_the_smallest_domain_that_holds_the_gang(workers: int, level: str, domain: str) -> None:
    found = place(cluster(grid(2, 3, 4)), gang(workers))
    assert isinstance(found, Placed)
    assert (found.level, found.domain, len(set(found.rows_W.tolist()))) == (level, domain, workers)


def test_best_fit_takes_the_fullest_domain_that_holds() -> None:
    free = grid(2, 2, 4)
    free["b1/r0/h00"] = 0
    found = place(cluster(free), gang(3))
    assert isinstance(found, Placed)
    assert found.domain == "b1-r0"


def test_of_equal_domains_the_calmer_one() -> None:
    found = place(cluster(grid(1, 2, 2), risk={"b0/r0/h01": 0.3, "b0/r1/h00": 0.1}), gang(2))
    assert isinstance(found, Placed)
    assert found.domain == "b0-r1"
    inventory = cluster(grid(1, 1, 3), risk={"b0/r0/h00": 0.3})
    assert nodes(inventory, place(inventory, gang(2))) == ["b0/r0/h01", "b0/r0/h02"]


def test_a_large_gang_avoids_risky_nodes_and_leaves_them_to_small_ones() -> None:
    """A rack with less room would fit best, but one of its nodes is risky: eight nodes of that risk rarely last."""
    free = grid(1, 2, 10)
    free["b0/r0/h09"] = 0
    inventory = cluster(free, risk={"b0/r0/h00": 0.125, "b0/r0/h01": 0.125})
    assert nodes(inventory, place(inventory, gang(8))) == [f"b0/r1/h0{at}" for at in range(8)]
    found = place(inventory, gang(2))
    assert isinstance(found, Placed)
    assert found.domain == "b0-r0"


def test_a_node_that_is_likely_to_fail_is_avoided_by_any_gang_unless_it_would_be_torn_apart() -> None:
    inventory = cluster({"b0/r0/h0": 8, "b0/r0/h1": 16, "b0/r1/h0": 32}, risk={"b0/r0/h0": 0.5, "b0/r1/h0": 0.5})
    assert nodes(inventory, place(inventory, gang(1))) == ["b0/r0/h1"]
    assert nodes(inventory, place(inventory, gang(2))) == ["b0/r0/h1"] * 2
    # Without the risky nodes there is room for two; one domain with a risky node holds all four.
    assert nodes(inventory, place(inventory, gang(4))) == ["b0/r1/h0"] * 4


def test_workers_that_move_stay_near_the_others_even_on_a_risky_node() -> None:
    inventory = cluster({"b0/r0/h0": 0, "b0/r0/h1": 8, "b0/r1/h0": 8}, risk={"b0/r0/h1": 0.5})
    near = np.array([inventory.rows["b0/r0/h0"]], dtype=np.int32)
    assert nodes(inventory, place(inventory, gang(1), near_W=near)) == ["b0/r0/h1"]


def test_inside_as_few_racks_as_possible() -> None:
    free = grid(1, 4, 4)
    free["b0/r0/h00"] = free["b0/r0/h01"] = 0
    inventory = cluster(free)
    racks = Counter(name[:5] for name in nodes(inventory, place(inventory, gang(10))))
    assert racks == {"b0/r0": 2, "b0/r1": 4, "b0/r2": 4}


def test_several_workers_share_a_node() -> None:
    inventory = cluster({"b0/r0/h0": 8, "b0/r0/h1": 4, "b0/r0/h2": 3})
    assert nodes(inventory, place(inventory, gang(3, devices=2))) == ["b0/r0/h0"] * 3
    assert nodes(inventory, place(inventory, gang(2, devices=2))) == ["b0/r0/h1"] * 2
    assert Counter(nodes(inventory, place(inventory, gang(7, devices=2)))) == {
        "b0/r0/h0": 4,
        "b0/r0/h1": 2,
        "b0/r0/h2": 1,
    }


def test_required_ends_the_walk_and_preferred_does_not() -> None:
    inventory = cluster(grid(2, 3, 4))
    assert unschedulable(inventory, workers=5, required="rack").reason is Reason.WAITING_FOR_TOPOLOGY
    found = place(inventory, gang(5, preferred="rack"))
    assert isinstance(found, Placed)
    assert found.level == "block"
    assert isinstance(place(inventory, gang(20, preferred="rack")), Placed)


@pytest.mark.parametrize("level", ["rack", "net/rack"])
def test_a_level_goes_by_name_or_by_label(level: str) -> None:
    assert isinstance(place(cluster(grid(1, 1, 4)), gang(4, required=level)), Placed)


@pytest.mark.parametrize("level", ["host", HOST_LEVEL])
def test_the_hosts_are_a_level(level: str) -> None:
    inventory = cluster(grid(1, 1, 2))
    assert nodes(inventory, place(inventory, gang(2, devices=4, required=level))) == ["b0/r0/h00"] * 2
    assert unschedulable(inventory, workers=3, devices=4, required=level).message == (
        "needs 3 workers in one host; 2 free in b0/r0/h00"
    )


def test_slices_lie_together() -> None:
    free = grid(1, 3, 4)
    del free["b0/r0/h00"]
    inventory = cluster(free)
    placed = nodes(inventory, place(inventory, gang(8, slice_size=2, slice_level="rack")))
    assert all(placed[at][:5] == placed[at + 1][:5] for at in range(0, 8, 2))
    found = unschedulable(inventory, workers=12, slice_size=2, slice_level="rack")
    assert found.reason is Reason.WAITING_FOR_CAPACITY
    found = unschedulable(inventory, workers=10, slice_size=5, slice_level="rack")
    assert (found.reason, found.message) == (
        Reason.WAITING_FOR_TOPOLOGY,
        "needs 10 nodes in slices of 5, each in one rack; 0 free so",
    )


def test_slices_within_a_required_domain() -> None:
    free = grid(2, 2, 4)
    free["b0/r0/h00"] = 0
    inventory = cluster(free)
    placed = nodes(inventory, place(inventory, gang(8, required="block", slice_size=4, slice_level="rack")))
    assert {name[:2] for name in placed} == {"b1"}
    found = unschedulable(
        cluster({**free, "b1/r1/h03": 0}), workers=8, required="block", slice_size=4, slice_level="rack"
    )
    assert found.message == "needs 8 nodes in one block in slices of 4, each in one rack; 4 free in b0"


def test_an_exclusive_gang_keeps_out_of_shared_domains() -> None:
    inventory = cluster(grid(1, 3, 2), busy=["b0/r0/h01"])
    placed = nodes(inventory, place(inventory, gang(4, exclusive="rack")))
    assert {name[:5] for name in placed} == {"b0/r1", "b0/r2"}
    found = unschedulable(inventory, workers=5, exclusive="rack")
    assert found.reason is Reason.WAITING_FOR_CAPACITY
    assert found.message == "needs 40 devices; room for 32 on 4 nodes; 2 free nodes are held for others"


def test_an_exclusive_gang_waits_where_no_node_bears_the_labels() -> None:
    inventory = cluster(grid(1, 1, 2), levels=(LevelView(name="zone", node_label="net/zone"),))
    assert unschedulable(inventory, workers=1, exclusive="zone").reason is Reason.WAITING_FOR_CAPACITY


def test_a_host_without_labels_is_no_domain_of_an_exclusive_gang() -> None:
    inventory = cluster(grid(1, 1, 2), busy=["b0/r0/h01"])
    inventory.domain_LN[:2, 1] = -1
    inventory.usable_N[1] = False
    assert nodes(inventory, place(inventory, gang(1, exclusive="host"))) == ["b0/r0/h00"]


def test_a_host_without_labels_is_no_domain_for_workers_that_join() -> None:
    inventory = cluster(grid(1, 1, 2))
    inventory.domain_LN[:2, 1] = -1
    inventory.usable_N[1] = False
    found = place(inventory, gang(1), near_W=np.array([1], dtype=np.int32))
    assert nodes(inventory, found) == ["b0/r0/h00"]


def test_an_exclusive_gang_takes_the_smallest_whole_domain() -> None:
    free = grid(1, 1, 4) | {f"b1/r0/h0{at}": 8 for at in range(2)}
    found = place(cluster(free), gang(1, exclusive="rack"))
    assert isinstance(found, Placed)
    assert found.domain.startswith("b1")


def test_blocked_nodes_stay_free() -> None:
    inventory = cluster(grid(1, 1, 3))
    blocked_N = np.array([True, False, False])
    found = place(inventory, gang(2), blocked_N=blocked_N)
    assert nodes(inventory, found) == ["b0/r0/h01", "b0/r0/h02"]
    assert blocked_N.tolist() == [True, False, False]


def test_a_topology_misfit_counts_the_nodes_out_of_service() -> None:
    out = [f"b1/r0/h{at:02d}" for at in range(4)]
    free = grid(2, 1, 13)
    for at in range(5, 13):
        free[f"b0/r0/h{at:02d}"] = 0
    found = unschedulable(cluster(free, out=out), workers=12, required="block")
    assert found.reason is Reason.WAITING_FOR_TOPOLOGY
    assert found.lacking == 3
    assert found.message == (
        "needs 12 nodes in one block; 9 free in b1; 4 of its nodes quarantined, cordoned or not ready"
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"required": "rak"}, "topology.required names level 'rak'; there are block, rack, host"),
        ({"exclusive": "x"}, "topology.exclusive names level 'x'; there are block, rack, host"),
        ({"slice_size": 3, "slice_level": "rack"}, "topology.sliceSize 3 does not divide 4 workers"),
        (
            {"required": "rack", "slice_size": 2, "slice_level": "block"},
            "sliceLevel block lies above topology.required",
        ),
        ({"devices": 9}, "a worker needs 9 nvidia.com/gpu; the largest node has 8"),
        ({"cpu": 65_000}, "a worker needs 65 cpu; the largest node has 64 cpu"),
    ],
)
def test_what_can_never_fit_is_misconfigured(fields: dict[str, Any], message: str) -> None:
    found = unschedulable(cluster(grid(2, 2, 4)), workers=4, **fields)
    assert found.reason is Reason.MISCONFIGURED
    assert message in found.message


def test_nodes_are_what_is_lacking_when_devices_are_free() -> None:
    names = list(grid(1, 1, 6))
    inventory = cluster(
        dict.fromkeys(names, 8), labels={name: {"gen": "2"} for name in names[1:]}, taints={names[1]: (Taint(key="t"),)}
    )
    inventory.used_NR[5, 1] = 64_000
    found = unschedulable(inventory, workers=4, constraints=Constraints(node_selector=(("gen", "2"),)))
    assert found.reason is Reason.WAITING_FOR_NODES
    assert found.lacking == 1
    assert found.message == (
        "needs 4 workers; room for 3; of 6 nodes with free devices 1 do not bear the labels that the pod template "
        "selects; 1 have taints that the pod template does not tolerate; 1 have too little cpu left for all workers "
        "that their devices would hold"
    )


def test_devices_are_what_is_lacking_when_they_are() -> None:
    found = unschedulable(cluster(grid(1, 1, 4), out=["b0/r0/h00"]), workers=4)
    assert (found.reason, found.lacking) == (Reason.WAITING_FOR_CAPACITY, 1)
    assert found.message == "needs 32 devices; room for 24 on 3 nodes; 1 node is out of service"


def test_a_cordoned_node_is_out_of_service_and_no_matter_of_tolerations() -> None:
    names = list(grid(1, 1, 4))
    cordoned = (Taint(key="node.kubernetes.io/unschedulable"),)
    inventory = cluster({**dict.fromkeys(names, 8), names[3]: 0}, out=names[:1], taints={names[0]: cordoned})
    assert unschedulable(inventory, workers=4).message == (
        "needs 32 devices; room for 16 on 2 nodes; 1 node is out of service"
    )


def test_nodes_that_could_never_hold_a_worker_are_not_missed() -> None:
    names = list(grid(1, 1, 4))
    inventory = cluster(dict.fromkeys(names, 8), out=names[3:])
    inventory.capacity_NR[3, 0] = 0
    assert unschedulable(inventory, workers=4).message == "needs 32 devices; room for 24 on 3 nodes"


def test_no_nodes_at_all() -> None:
    found = unschedulable(cluster({}), workers=1)
    assert (found.reason, found.message) == (Reason.WAITING_FOR_NODES, "the cluster has no nodes")


def test_charging_is_undone_by_its_opposite() -> None:
    inventory = cluster(grid(1, 1, 2))
    before = inventory.used_NR.copy()
    request = dataclasses.replace(gang(3, devices=2), requests=(*gang(3, devices=2).requests, ("unknown", 1)))
    rows_W = np.array([0, 0, -1], dtype=np.int32)
    charge(inventory, request, rows_W)
    assert inventory.used_NR[0].tolist() == [4, 2000, 2]
    assert inventory.busy_N.tolist() == [2, 0]
    charge(inventory, request, rows_W, sign=-1)
    assert (inventory.used_NR == before).all()
    assert not inventory.busy_N.any()


def test_unlabelled_nodes_take_nothing() -> None:
    inventory = cluster(grid(1, 1, 2))
    inventory.domain_LN[:2, 1] = -1
    inventory.usable_N[1] = False
    assert nodes(inventory, place(inventory, gang(1))) == ["b0/r0/h00"]
    assert unschedulable(inventory, workers=2).reason is Reason.WAITING_FOR_CAPACITY


@pytest.mark.parametrize(
    ("full", "workers", "racks"),
    [((), 1, {"b1/r1"}), (("b1/r1/h01", "b1/r1/h02"), 2, {"b1/r0"}), (("b1",), 1, {"b0/r0"})],
)
def test_replacements_are_placed_near_the_remaining_workers(
    full: tuple[str, ...], workers: int, racks: set[str]
) -> None:
    free = {name: 0 if name.startswith(full or ("-",)) else 8 for name in grid(2, 2, 3)}
    free["b0/r0/h00"] = 8
    free["b0/r0/h01"] = free["b0/r0/h02"] = 0  # the tightest fit of all
    inventory = cluster(free)
    staying_W = np.array([inventory.rows["b1/r1/h00"]], dtype=np.int32)
    found = place(inventory, gang(workers), near_W=staying_W, blocked_N=np.isin(np.arange(12), staying_W))
    assert {name[:5] for name in nodes(inventory, found)} == racks
