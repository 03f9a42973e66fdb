"""What the repetition of a step shows: which rank differs from itself, or from its neighbours on the same packs."""

from __future__ import annotations

import dataclasses
import math

from polyreme_planner.layout import Layout
from polyreme_trainer.train.recomputation import Mark, Marks, finding, odd_ranks, rank_before

FOUR = Layout(dp=4)


def marks(layout: Layout, *, wrong: frozenset[int] = frozenset()) -> list[Marks]:
    """Return what the ranks compute if some of them are wrong each time."""

    def computed(packs: int, by: int) -> Mark:
        return Mark(loss=100.0 + packs, dense=7.0 + packs + 50.0 * (by in wrong), held=3.0)

    return [
        Marks(computed(rank, rank), computed(rank, rank), computed(rank_before(rank, layout), rank), f"node-{rank}")
        for rank in range(layout.world)
    ]


def test_the_neighbour_is_of_the_same_stage_and_the_same_slices() -> None:
    layout = Layout(pp=2, dp=2, tp=2)
    assert [rank_before(rank, layout) for rank in range(8)] == [2, 3, 0, 1, 6, 7, 4, 5]


def test_a_rank_that_is_wrong_each_time_is_named() -> None:
    assert odd_ranks(marks(FOUR), FOUR) == []
    for rank in range(4):
        assert odd_ranks(marks(FOUR, wrong=frozenset({rank})), FOUR) == [rank]
    two = Layout(dp=2, tp=2)
    assert odd_ranks(marks(two, wrong=frozenset({3})), two) == [1, 3], "of two copies neither is right"


def test_a_rank_that_differs_from_itself_is_named_with_its_host() -> None:
    seen = marks(FOUR)
    seen[1] = dataclasses.replace(seen[1], again=dataclasses.replace(seen[1].again, dense=9.0))
    assert finding(seen, FOUR) == "computed again, rank 1 (node-1) had another result: a fault that passed"


def test_a_result_that_is_not_finite_each_time_is_the_same() -> None:
    nothing = Mark(loss=math.nan, dense=math.nan, held=math.inf)
    seen = [Marks(nothing, nothing, nothing, "node")] * 4
    assert finding(seen, FOUR) == "computed again on the same and on other ranks, the result is the same"
    alone = [Marks(nothing, nothing, None, "node")]
    assert finding(alone, Layout()) == "computed again on the same ranks, the result is the same"
