"""Prompts that several ranks have are drawn once, whatever layout draws them."""

from __future__ import annotations

import types
from typing import Any, cast

import pytest

from polyreme_planner.layout import Layout
from polyreme_trainer.parallel.mesh import dense_place
from polyreme_trainer.train.rollouts.generation import in_own_layout


@pytest.mark.parametrize("layout", [Layout(dp=2, pp=2, cp=2, tp=2), Layout(dp=4), Layout(pp=2, tp=4)], ids=str)
def test_ranks_with_the_same_prompts_share_them(layout: Layout) -> None:
    copy = cast("Any", types.SimpleNamespace(model=None, agree=int))
    shares: dict[int, list[tuple[int, int]]] = {}
    for rank in range(layout.world):
        place = dense_place(layout, rank)
        meshes = cast("Any", types.SimpleNamespace(layout=layout, place=place.__getitem__))
        shares.setdefault(place["dp"], []).append(in_own_layout(copy, meshes).share)
    ranks = layout.world // layout.dp
    for found in shares.values():
        assert sorted(found) == [(number, ranks) for number in range(ranks)]
