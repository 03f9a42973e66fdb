"""Nodes that are kept as spares: no new gang takes them, workers that lost their node do."""

import dataclasses

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_operator.health.record import PROBATION
from polyreme_operator.placement.spares import spares_N
from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.types.inventory import SparesView, Taint
from polyreme_operator.types.views import NodeView
from tests.unit.operator.operator_scenes import NOW_S, job, pod, why
from tests.unit.operator.placement_scenes import cluster, grid
from tests.unit.operator.test_scheduling_cycles import RACKS, in_rack, only, running

ONE = SparesView(level="rack", nodes=1)
TWO_NODES = (in_rack("a0", "a", 1), in_rack("a1", "a", 1))


def names(free: dict[str, int], spares: SparesView = ONE, *, reserved: str = "", **fields: object) -> list[str]:
    inventory = cluster(free, **fields)  # type: ignore[arg-type]
    reserved_N = np.array([name == reserved for name in inventory.names])
    return [inventory.names[row] for row in np.flatnonzero(spares_N(inventory, spares, reserved_N=reserved_N))]


def test_each_domain_keeps_its_last_idle_nodes_in_service() -> None:
    free = grid(1, 2, 3)
    assert names(free) == ["b0/r0/h02", "b0/r1/h02"]
    assert names(free, SparesView(level="block", nodes=2)) == ["b0/r1/h01", "b0/r1/h02"]
    assert names(free, SparesView(level="gone", nodes=2)) == []
    assert names(free, busy=["b0/r0/h02"], out=["b0/r1/h02"]) == ["b0/r0/h01", "b0/r1/h01"]
    assert names(free, busy=list(free)) == ["b0/r0/h02", "b0/r1/h02"]
    probation = {"b0/r0/h02": (Taint(key=PROBATION),)}
    assert names(free, taints=probation, reserved="b0/r1/h02") == ["b0/r0/h01", "b0/r1/h01"]


def test_a_share_is_one_of_all_nodes_of_the_domain_and_rounded_up() -> None:
    free = grid(1, 2, 5)
    assert names(free, SparesView(level="rack", percent=10)) == ["b0/r0/h04", "b0/r1/h04"]
    assert names(free, SparesView(level="rack", percent=21)) == ["b0/r0/h03", "b0/r0/h04", "b0/r1/h03", "b0/r1/h04"]
    assert names(free, SparesView(level="block", percent=20)) == ["b0/r1/h03", "b0/r1/h04"]
    out = [f"b0/r0/h0{at}" for at in range(4)]
    assert names(free, SparesView(level="rack", percent=40), out=out) == ["b0/r0/h04", "b0/r1/h03", "b0/r1/h04"]


def test_a_new_gang_leaves_the_spare_and_says_so() -> None:
    for replicas, placed in ((1, True), (2, False)):
        seen = cluster_of(jobs=(job("j", replicas=replicas),), nodes=TWO_NODES, levels=RACKS, spares=ONE)
        batch = schedule(seen, NOW_S)
        if placed:
            assert only(batch).after.attempt.placement.node_by_index() == ["a0"]
        else:
            assert not batch.writes
            message = why(seen, batch)["uid-j"].message
            assert message == "needs 2 devices; room for 1 on 1 node; 1 free node is kept as a spare"
    together = job("j", replicas=2, topology={"required": "rack"})
    seen = cluster_of(jobs=(together,), nodes=(*TWO_NODES, in_rack("b0", "b", 1)), levels=RACKS, spares=ONE)
    assert "kept as" in why(seen, schedule(seen, NOW_S))["uid-j"].message


def test_a_worker_that_lost_its_node_takes_the_spare() -> None:
    owner = running("owner", ("a0",), topology={"required": "rack"})
    out = dataclasses.replace(TWO_NODES[0], out_of_service=True)
    pods = (pod(owner, 0, where="a0"),)
    seen = cluster_of(jobs=(owner,), nodes=(out, TWO_NODES[1]), pods=pods, levels=RACKS, spares=ONE)
    assert only(schedule(seen, NOW_S)).after.attempt.placement.node_by_index() == ["a1"]


@given(
    racks=st.lists(st.integers(1, 4), min_size=1, max_size=3),
    spares=st.integers(1, 3),
    gangs=st.lists(st.integers(1, 3), min_size=1, max_size=4),
    broken=st.integers(0, 3),
)
@settings(max_examples=60, deadline=None)
def test_new_gangs_leave_as_many_idle_nodes_as_are_asked_and_repairs_use_them(
    racks: list[int], spares: int, gangs: list[int], broken: int
) -> None:
    nodes: dict[str, NodeView] = {
        f"{rack}{at}": in_rack(f"{rack}{at}", rack, 1)
        for rack, count in zip("abc", racks, strict=False)
        for at in range(count)
    }
    kept = SparesView(level="rack", nodes=spares)
    jobs = tuple(job(f"j{at}", replicas=workers) for at, workers in enumerate(gangs))
    batch = schedule(cluster_of(jobs=jobs, nodes=nodes.values(), levels=RACKS, spares=kept), NOW_S)
    held = [name for write in batch.writes for name in write.after.attempt.placement.node_by_index()]  # type: ignore[union-attr]
    for rack, count in zip("abc", racks, strict=False):
        assert count - sum(name.startswith(rack) for name in held) >= min(spares, count)
    if not held:
        return
    lost = held[broken % len(held)]
    owner = running("owner", (lost,), topology={"required": "rack"})
    out = dataclasses.replace(nodes[lost], out_of_service=True)
    left = [out, *(nodes[name] for name in nodes if name != lost and name[0] == lost[0])]
    seen = cluster_of(jobs=(owner,), nodes=left, pods=(pod(owner, 0, where=lost),), levels=RACKS, spares=kept)
    moved = only(schedule(seen, NOW_S)).after
    # Spares are idle nodes of the same rack, so a gang that lost a node always finds room there.
    assert moved.attempt.placement.node_by_index()[0] in {node.name for node in left[1:]}
