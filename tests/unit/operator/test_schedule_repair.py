"""Where workers go that have lost their places: as near together as their gang requires, whichever workers are left."""

import dataclasses
from typing import Any

import pytest

from polyreme_operator.reconcile.transition import stop_for_resize
from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.types.inventory import LevelView
from polyreme_operator.types.queues import QueueView, Quota
from polyreme_operator.types.views import JobView, NodeView, PodPhase
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, decide, job, lease, pod, snapshot
from tests.unit.operator.test_scheduling_cycles import RACKS, in_rack, only, running

SLICES = {"sliceSize": 2, "sliceLevel": "rack"}


def lost(name: str, rack: str) -> NodeView:
    return dataclasses.replace(in_rack(name, rack), out_of_service=True)


def moved(
    owner: JobView,
    *nodes: NodeView,
    levels: tuple[LevelView, ...] = RACKS,
    queues: tuple[QueueView, ...] = (),
) -> list[str] | None:
    """Where a round puts the gang; None if it takes it off."""
    places = [] if owner.attempt is None else owner.attempt.placement.node_by_index()
    pods = tuple(
        dataclasses.replace(pod(owner, index, where=place), queue=owner.spec.queue_name if owner.spec else "")
        for index, place in enumerate(places)
    )
    cluster = cluster_of(jobs=(owner,), nodes=nodes, pods=pods, levels=levels, queues=queues)
    after = only(schedule(cluster, NOW_S)).after
    return after.attempt.placement.node_by_index() if after.is_true("Admitted") else None


@pytest.mark.parametrize(
    ("spare", "placed"),
    [((("b0", "b", 1), ("c0", "c", 1)), None), ((("b0", "b", 1), ("c0", "c", 1), ("c1", "c", 1)), ["c0", "c1"])],
)
def test_a_gang_that_lost_all_its_nodes_goes_to_one_rack_or_is_taken_off(
    spare: tuple[tuple[str, str, int], ...], placed: list[str] | None
) -> None:
    owner = running("owner", ("a0", "a0"), topology={"required": "rack"})
    assert moved(owner, lost("a0", "a"), *(in_rack(*each) for each in spare)) == placed


def test_slices_of_a_gang_that_lost_all_its_nodes_go_to_one_block() -> None:
    levels = (LevelView(name="block", node_label="block"), *RACKS)
    owner = running("owner", ("a0", "a0", "a0", "a0"), topology={"required": "block", **SLICES})

    def at(name: str, block: str, rack: str, **fields: Any) -> NodeView:
        found = in_rack(name, rack)
        return dataclasses.replace(found, labels=(("block", block), *found.labels), **fields)

    nodes = (at("a0", "x", "a", out_of_service=True), at("b0", "y", "b"), at("c0", "z", "c"), at("d0", "z", "d"))
    assert moved(owner, *nodes, levels=levels) == ["c0", "c0", "d0", "d0"]
    assert moved(owner, *nodes[:3], levels=levels) is None


@pytest.mark.parametrize("levels", [RACKS, ()], ids=["relabelled", "level is gone"])
def test_a_gang_that_lies_together_no_longer_is_taken_off_when_it_loses_a_node(levels: tuple[LevelView, ...]) -> None:
    owner = running("owner", ("a0", "a1", "a2"), topology={"required": "rack"})
    nodes = (in_rack("a0", "a", 1), in_rack("a1", "b", 1), lost("a2", "a"), in_rack("a3", "a"), in_rack("b0", "b"))
    assert moved(owner, *nodes, levels=levels) is None


@pytest.mark.parametrize(
    ("spare", "stays"), [((("b1", "b", 2), ("c0", "c", 1)), False), ((("c0", "c", 1),), True)], ids=["room", "no room"]
)
@pytest.mark.parametrize("topology", [{"required": "rack"}, {"sliceSize": 2, "sliceLevel": "rack"}])
def test_a_gang_whose_nodes_were_relabelled_is_placed_as_a_whole_at_its_next_restart_if_there_is_room(
    topology: dict[str, Any], spare: tuple[tuple[str, str, int], ...], stays: bool
) -> None:
    owner = running("owner", ("a0", "a1"), topology=topology)
    pods = tuple(pod(owner, index, where=f"a{index}", phase=PodPhase.FAILED, exit_code=1) for index in range(2))
    nodes = (in_rack("a0", "a", 1), in_rack("a1", "b", 1), *(in_rack(*each) for each in spare))
    seen = snapshot(owner, pods=pods, nodes={each.name: each for each in nodes}, lease=lease(owner))
    decision = decide(dataclasses.replace(seen, levels=RACKS, lease_read=True))
    assert decision.reschedule
    assert not decide(dataclasses.replace(seen, lease_read=True)).reschedule, "its nodes are in one domain"
    cluster = cluster_of(
        jobs=(owner,), nodes=nodes, pods=pods, leases=(lease(owner),), levels=RACKS, leases_read=frozenset({owner.uid})
    )
    after = only(schedule(cluster, NOW_S)).after
    assert after.is_true("Admitted") == stays
    if stays:
        assert after.attempt is not None
        assert after.attempt.placement.node_by_index() == ["a0", "a1"]


def test_a_slice_that_lies_together_no_longer_is_not_mended_in_part() -> None:
    owner = running("owner", ("a0", "a1", "b0", "b1"), topology={"sliceSize": 4, "sliceLevel": "rack"})
    nodes = (in_rack("a0", "a", 1), in_rack("a1", "a", 1), in_rack("b0", "b", 1), lost("b1", "a"), in_rack("a2", "a"))
    assert moved(owner, *nodes) is None


@pytest.mark.parametrize(
    ("topology", "placed"),
    [
        ({"required": "rack"}, None),
        ({"sliceSize": 2, "sliceLevel": "rack"}, None),
        ({"preferred": "rack"}, ["a1", "gone"]),
        ({}, ["a1", "gone"]),
    ],
)
def test_a_gang_that_stays_on_a_node_that_is_gone_gets_no_worker_elsewhere_if_they_must_be_near(
    topology: dict[str, Any], placed: list[str] | None
) -> None:
    """Its own rack is not known any more, and the next one would be another."""
    owner = running("owner", ("a0", "gone"), topology=topology)
    assert moved(owner, lost("a0", "a"), in_rack("a1", "a", 1)) == placed


def test_a_gang_that_lies_together_no_longer_does_not_grow() -> None:
    owner = running("owner", ("a0", "b0"), topology={"required": "rack"})
    wish = job("owner", replicas=3, topology={"required": "rack"})
    wished = dataclasses.replace(owner, spec=wish.spec, plans=wish.plans, generation=owner.generation + 1)
    for rack, size in (("a", 3), ("b", 2)):
        nodes = (in_rack("a0", "a", 1), in_rack("b0", rack, 1), in_rack("a1", "a"), in_rack("b1", "b"))
        cluster = cluster_of(jobs=(wished,), nodes=nodes, levels=RACKS)
        batch = schedule(dataclasses.replace(cluster, asking=()), NOW_S)
        assert ("uid-owner" in batch.refused) == (size == 2)
        if size == 2:
            assert batch.refused["uid-owner"].why.startswith("its workers are no longer known to be in one rack")
        stopped = dataclasses.replace(wished, status=stop_for_resize(owner, NOW_S - 1000))
        after = only(schedule(cluster_of(jobs=(stopped,), nodes=nodes, levels=RACKS), NOW_S)).after
        assert after.attempt.replicas == size


def test_a_gang_moved_in_the_same_cycle_keeps_its_rack_exclusive() -> None:
    owner = running("owner", ("a0",), topology={"exclusive": "rack"})
    nodes = (lost("a0", "a"), in_rack("b0", "b", 1), in_rack("b1", "b", 2))
    batch = schedule(cluster_of(jobs=(owner, job("j", replicas=2)), nodes=nodes, levels=RACKS), NOW_S)
    write = only(batch)
    assert (write.uid, write.after.attempt.placement.node_by_index()) == ("uid-owner", ["b0"])


def test_a_gang_grown_in_the_same_cycle_keeps_its_rack_exclusive() -> None:
    owner = running("owner", ("a0",), topology={"exclusive": "rack"})
    wish = job("owner", replicas=2, topology={"exclusive": "rack"})
    wished = dataclasses.replace(owner, spec=wish.spec, plans=wish.plans, generation=owner.generation + 1)
    stopped = dataclasses.replace(wished, status=stop_for_resize(owner, NOW_S - 1000))
    nodes = (in_rack("a0", "a", 1), in_rack("b0", "b", 1), in_rack("b1", "b", 2))
    batch = schedule(cluster_of(jobs=(stopped, job("j", replicas=2)), nodes=nodes, levels=RACKS), NOW_S)
    write = only(batch)
    assert (write.uid, write.after.attempt.placement.node_by_index()) == ("uid-owner", ["a0", "b0"])


@pytest.mark.parametrize(("nominal", "placed"), [(1, None), (2, ["a0", "b0"])], ids=["quota lowered", "queue is full"])
def test_a_worker_moves_within_a_full_queue_but_not_in_one_that_uses_more_than_its_quota(
    nominal: int, placed: list[str] | None
) -> None:
    """A move replaces a worker: its queue is charged for it once, also while the lost pod may still run."""
    queues = (QueueView(name="q", quotas=(Quota(resource=DEVICE, nominal=nominal),)),)
    owner = running("owner", ("a0", "a1"), queueName="q")
    nodes = (in_rack("a0", "a", 1), lost("a1", "a"), in_rack("b0", "b"))
    assert moved(owner, *nodes, queues=queues) == placed
