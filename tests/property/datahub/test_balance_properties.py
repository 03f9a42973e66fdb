"""The assignment of packs to ranks, for any costs: nothing lost, nothing doubled, never slower than the order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.loader.order.balance import StepSplit, assign_packs, slowest


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], StepSplit]:
    """Any costs of packs, and a split that fits them, with null packs or without."""
    split = StepSplit(data_ranks=draw(st.integers(1, 8)), microbatches=draw(st.integers(1, 4)))
    places = split.data_ranks * split.microbatches * draw(st.integers(1, 3))
    packs = places - draw(st.integers(0, min(split.data_ranks, places) - 1))
    return draw(st.lists(st.integers(0, 10**18), min_size=packs, max_size=packs)), split


def at_places(costs: list[int], assigned: list[int]) -> list[int]:
    return [costs[pack] if pack < len(costs) else 0 for pack in assigned]


def in_order(costs: list[int], split: StepSplit) -> list[int]:
    return list(range(-(-len(costs) // split.data_ranks) * split.data_ranks))


@given(steps())
def test_every_pack_has_one_place_and_null_packs_are_their_ranks_last(step: tuple[list[int], StepSplit]) -> None:
    costs, split = step
    assigned = assign_packs(costs, split)
    assert sorted(assigned) == list(range(len(assigned)))
    share, rest = divmod(len(assigned), split.data_ranks)
    assert (share, rest) == (-(-len(costs) // split.data_ranks), 0)
    for first in range(0, len(assigned), share):
        null = [pack >= len(costs) for pack in assigned[first : first + share]]
        assert null == sorted(null)


@given(steps())
def test_no_step_is_slower_than_in_the_order(step: tuple[list[int], StepSplit]) -> None:
    costs, split = step
    assert slowest(at_places(costs, assign_packs(costs, split)), split) <= slowest(
        at_places(costs, in_order(costs, split)), split
    )


def test_a_step_costs_what_its_slowest_ranks_do() -> None:
    costs = [5, 1, 2, 7]
    assert slowest(costs, StepSplit(data_ranks=2)) == 9
    assert slowest(costs, StepSplit(data_ranks=2, microbatches=2)) == 5 + 7


@given(st.integers(1, 8), st.lists(st.integers(0, 10**6), min_size=1, max_size=12))
def test_the_dearest_rank_has_at_most_one_dearest_pack_more_than_the_cheapest(ranks: int, rounds: list[int]) -> None:
    """Or the order is as good; costs that rise from rank to rank, the worst case of an order."""
    costs = sorted(cost + at for cost in rounds for at in range(ranks))
    split = StepSplit(data_ranks=ranks)
    placed = at_places(costs, assign_packs(costs, split))
    sums = [sum(placed[at : at + len(rounds)]) for at in range(0, len(costs), len(rounds))]
    assert max(sums) - min(sums) <= max(costs)


@pytest.mark.parametrize(
    ("costs", "split", "sums"),
    [
        ([9, 8, 2, 1], StepSplit(2), [10, 10]),
        ([9, 1, 1, 1, 9, 1, 1, 1], StepSplit(2), [12, 12]),
        ([9, 9, 9, 1, 1, 1], StepSplit(3), [10, 10, 10]),
        ([5, 5, 5, 5], StepSplit(2), [10, 10]),
    ],
)
def test_costs_that_can_be_even_are(costs: list[int], split: StepSplit, sums: list[int]) -> None:
    placed, share = at_places(costs, assign_packs(costs, split)), len(costs) // split.data_ranks
    assert [sum(placed[at : at + share]) for at in range(0, len(costs), share)] == sums


def test_packs_of_like_cost_meet_in_a_microbatch() -> None:
    split = StepSplit(data_ranks=2, microbatches=2)
    assert at_places([9, 1, 1, 9], assign_packs([9, 1, 1, 9], split)) == [9, 1, 9, 1]


def test_an_order_that_is_as_good_is_kept() -> None:
    assert assign_packs([1, 9, 1, 9], StepSplit(data_ranks=2)) == [0, 1, 2, 3]


def test_a_split_that_does_not_fit_is_refused() -> None:
    with pytest.raises(
        InvalidConfigError, match="3 of each of 2 data-parallel ranks are not divisible by 2 micro"
    ) as seen:
        assign_packs([1] * 6, StepSplit(data_ranks=2, microbatches=2))
    assert seen.value.field == "spec.training.packsPerStep"
