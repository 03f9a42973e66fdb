"""Groups of sums, without a process: every gradient meets all its other parts, and no other, exactly once."""

from __future__ import annotations

import itertools

import pytest

from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.mesh import DENSE_AXES, GROUP_AXES, dense_place, group_ranks, sparse_place

LAYOUTS = [
    Layout(pp=2, dp=2, cp=2, tp=2, ep=4),
    Layout(dp=4, ep=2),
    Layout(cp=4, tp=2, ep=8, ulysses=2),
    Layout(pp=3, dp=2),
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_each_kind_of_group_parts_the_world(layout: Layout) -> None:
    for name, axes in GROUP_AXES.items():
        groups = {group_ranks(layout, rank, axes) for rank in range(layout.world)}
        assert sorted(itertools.chain.from_iterable(groups)) == list(range(layout.world)), name
        assert all(rank in group_ranks(layout, rank, axes) for rank in range(layout.world)), name


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_ranks_of_a_group_differ_along_its_axes_only(layout: Layout) -> None:
    for axes in [axes for axes in GROUP_AXES.values() if not set(axes) & {"ring", "ulysses"}]:
        place = dense_place if set(axes) <= set(DENSE_AXES) else sparse_place
        for rank, other in itertools.product(range(layout.world), repeat=2):
            kept = set(place(layout, 0)) - set(axes)
            same = all(place(layout, rank)[axis] == place(layout, other)[axis] for axis in kept)
            assert (other in group_ranks(layout, rank, axes)) == same


def test_a_context_group_is_a_ring_of_ulysses_groups_which_are_neighbours() -> None:
    layout = Layout(cp=4, ulysses=2, tp=2)
    assert group_ranks(layout, 0, ("ulysses",)) == (0, 2)
    assert group_ranks(layout, 0, ("ring",)) == (0, 4)
    assert group_ranks(layout, 0, ("cp",)) == (0, 2, 4, 6)


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_the_token_shards_of_a_stage_are_the_experts_and_their_copies(layout: Layout) -> None:
    """Folding: what dp x cp x tp is to tokens, edp x ep is to experts, over the same ranks."""
    for rank in range(layout.world):
        experts = {
            other for copy in group_ranks(layout, rank, ("edp",)) for other in group_ranks(layout, copy, ("ep",))
        }
        assert experts == set(group_ranks(layout, rank, GROUP_AXES["stage_group"]))
