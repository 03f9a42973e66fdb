"""Places of ranks in both meshes, without a process."""

from __future__ import annotations

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.mesh import dense_place, experts_of, packs_of, sparse_place

FOLDED = Layout(pp=2, dp=4, tp=2, ep=4)


def test_every_rank_has_one_place_in_each_mesh() -> None:
    ranks = range(FOLDED.world)
    assert len({tuple(dense_place(FOLDED, rank).values()) for rank in ranks}) == FOLDED.world
    assert len({tuple(sparse_place(FOLDED, rank).values()) for rank in ranks}) == FOLDED.world


def test_a_rank_has_the_same_pipeline_stage_in_both_meshes() -> None:
    assert all(dense_place(FOLDED, r)["pp"] == sparse_place(FOLDED, r)["pp"] for r in range(FOLDED.world))


def test_the_ranks_of_an_expert_group_are_neighbours() -> None:
    layout = Layout(dp=8, ep=4)
    assert [sparse_place(layout, rank)["ep"] for rank in range(8)] == [0, 1, 2, 3, 0, 1, 2, 3]
    assert [sparse_place(layout, rank)["edp"] for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]


@pytest.mark.parametrize("layout", [Layout(dp=4, ep=1), Layout(dp=4, ep=2), Layout(dp=4, ep=4)], ids=str)
def test_each_expert_is_held_by_one_rank_of_every_expert_group(layout: Layout) -> None:
    held = [expert for rank in range(4) for expert in experts_of(layout, rank, 8)]
    assert sorted(held) == sorted(list(range(8)) * layout.edp)


def test_the_packs_of_a_step_are_shared_out_once_and_in_order() -> None:
    layout = Layout(dp=4, ep=2)
    assert [pack for rank in range(4) for pack in packs_of(layout, rank, 12)] == list(range(12))
    assert [pack for rank in range(4) for pack in packs_of(layout, rank, 10)] == list(range(12)), "two null packs"


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: packs_of(Layout(dp=4), 0, 6), "dp=4 leaves ranks without one of the 6 packs"),
        (lambda: experts_of(Layout(dp=3, ep=3), 0, 8), "ep=3 must divide the 8 experts"),
        (lambda: sparse_place(Layout(dp=4, ep=3), 0), "ep=3 must divide dp\\*cp\\*tp=4"),
        (lambda: dense_place(Layout(dp=2), 2), "rank outside the mesh: 2"),
    ],
)
def test_what_does_not_fit_is_refused_with_the_number_to_change(call: object, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        call()  # type: ignore[operator]
