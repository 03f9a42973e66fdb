"""Data-parallel ranks that take each other's images."""

from __future__ import annotations

import itertools

import pytest

from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.mesh import group_ranks
from polyreme_trainer.train.image_assignment import NEIGHBOURS_MAX, neighbours


@pytest.mark.parametrize("layout", [Layout(dp=256), Layout(dp=13), Layout(dp=6, cp=2, tp=2), Layout(dp=2, pp=4, tp=3)])
def test_neighbours_are_few_consecutive_ranks_that_agree(layout: Layout) -> None:
    groups = [neighbours(layout, dp) for dp in range(layout.dp)]
    assert all(dp in near and groups[dp] == near for near in groups for dp in near)
    for near in groups:
        assert len(near) * layout.cp * layout.tp <= NEIGHBOURS_MAX
        ranks = group_ranks(layout, 0, ("dp", "cp", "tp"))
        numbers = ranks[near.start * layout.cp * layout.tp : near.stop * layout.cp * layout.tp]
        assert all(after == before + 1 for before, after in itertools.pairwise(numbers))
    assert max(map(len, groups)) == min(layout.dp, NEIGHBOURS_MAX // (layout.cp * layout.tp))


def test_a_stream_that_half_a_node_shares_or_more_has_no_neighbours() -> None:
    assert neighbours(Layout(dp=4, cp=4, tp=2), 3) == range(3, 4)
    assert neighbours(Layout(dp=4, cp=8, tp=8), 0) == range(1)
