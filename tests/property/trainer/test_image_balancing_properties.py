"""Dealing images to data-parallel ranks: none is lost or doubled, the slowest rank gets faster, and all come home."""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.parallel import image_balancing as deal_module
from polyreme_trainer.parallel.image_balancing import Deal, deal_images, held_behind_tower, way_home
from polyreme_trainer.parallel.images import share_images
from polyreme_trainer.train import image_assignment as dealing_module
from polyreme_trainer.train.image_assignment import Dealing
from tests.parallel.pages import Pages

cells_by_rank = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=6)
parts_of = st.integers(1, 3)
besides_of = st.integers(0, 2000)


def costs_of(cells: list[list[int]]) -> list[list[int]]:
    return [[count * (30 + count) for count in own] for own in cells]


def home_loads(costs: list[list[int]], parts: int) -> list[int]:
    return [sum(own[image] for image in share) for own in costs for share in share_images(own, parts)]


def forced(cells: list[list[int]], parts: int) -> Deal:
    """A deal also where none is worth it: every image goes one encoder on."""
    homes = [[0] * len(own) for own in cells]
    encoders: list[list[tuple[int, int]]] = [[] for _ in range(len(cells) * parts)]
    for dp, own in enumerate(costs_of(cells)):
        for part, share in enumerate(share_images(own, parts)):
            for image in share:
                homes[dp][image] = dp * parts + part
                encoders[(dp * parts + part + image % 2) % len(encoders)].append((dp, image))
    return Deal(homes=tuple(map(tuple, homes)), by_encoder=tuple(map(tuple, encoders)))


@given(cells_by_rank, parts_of, besides_of)
def test_a_deal_keeps_every_image_once_and_makes_the_slowest_rank_faster(
    cells: list[list[int]], parts: int, besides: int
) -> None:
    costs = costs_of(cells)
    dealt = deal_images(costs, parts=parts, besides=besides)
    before = home_loads(costs, parts)
    if dealt is None:
        return
    seen = sorted(itertools.chain(*dealt.by_encoder))
    assert seen == [(dp, number) for dp, own in enumerate(cells) for number in range(len(own))]
    after = dealt.loads(costs)
    assert sum(after) == sum(before)
    assert max(before) - max(after) >= deal_module.GAIN_MIN * (besides + max(before)), "less is worth no exchange"
    guests = sum(dealt.home_of(image) != at for at, images in enumerate(dealt.by_encoder) for image in images)
    assert 0 < guests <= deal_module.MOVES_MAX
    for encoder, images in enumerate(dealt.by_encoder):
        own = [image for image in images if image[0] == encoder // parts]
        assert list(images[: len(own)]) == sorted(own), "a rank's own stand first, in order"
        assert list(images[len(own) :]) == sorted(images[len(own) :])
    assert deal_images(copy.deepcopy(costs), parts=parts, besides=besides) == dealt, "every rank has the same"


@given(cells_by_rank, parts_of, besides_of)
def test_images_stay_at_home_only_where_moving_any_would_not_pay(
    cells: list[list[int]], parts: int, besides: int
) -> None:
    """Where there is no deal, no first move from the fullest to the emptiest gains twice what is asked for."""
    costs = costs_of(cells)
    if deal_images(costs, parts=parts, besides=besides) is not None:
        return
    loads = home_loads(costs, parts)
    fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
    worth = max(1, deal_module.GAIN_MIN * (besides + max(loads)))
    own = costs[fullest // parts]
    second = max([load for at, load in enumerate(loads) if at != fullest], default=max(loads))
    for image in share_images(own, parts)[fullest % parts]:
        largest = max(loads[fullest] - own[image], loads[emptiest] + own[image], second)
        assert max(loads) - largest < worth


@given(cells_by_rank, parts_of, st.integers(1, 3), st.sets(st.integers(0, 11), max_size=3), st.booleans())
def test_features_come_home_each_once_and_in_order(
    cells: list[list[int]], parts: int, tp: int, lost: set[int], worth: bool
) -> None:
    """Rows bear the names of their cells, and are laid before the others as each rank tells."""
    dealt = (deal_images(costs_of(cells), parts=parts, besides=0) if worth else None) or forced(cells, parts)
    for place in range(tp):
        ways = [
            way_home(dealt, cells, encoder, tp=tp, place=place, lost=frozenset(lost))
            for encoder in range(len(cells) * parts)
        ]
        made = [
            np.array(
                [
                    (*held.image, cell)
                    for held in held_behind_tower(dealt, cells, encoder, tp=tp, place=place)
                    for cell in held.cells
                ],
                np.int64,
            ).reshape(-1, 3)
            for encoder in range(len(ways))
        ]
        letters = [np.split(rows[way.leaving], np.cumsum(way.sent)[:-1]) for rows, way in zip(made, ways, strict=True)]
        for home, way in enumerate(ways):
            came = [letters[sender][home] for sender in range(len(ways))]
            assert [len(rows) for rows in came] == way.received
            here = np.concatenate([made[home][way.kept], *came])[way.order]
            own = cells[home // parts]
            first = np.cumsum([0, *(0 if image in lost else count for image, count in enumerate(own))])
            assert [int(first[image] + cell) for _, image, cell in here] == way.rows.tolist()
            assert all(dp == home // parts and image not in lost for dp, image, _ in here)
            assert (np.diff(way.rows) > 0).all()
    for dp, own in enumerate(cells):
        rows = [
            way_home(dealt, cells, dp * parts + part, tp=tp, place=place, lost=frozenset(lost)).rows
            for part in range(parts)
            for place in range(tp)
        ]
        tokens = sum(count for image, count in enumerate(own) if image not in lost)
        assert sorted(np.concatenate(rows)) == list(range(tokens)), "each media token has its feature, on one rank"


@pytest.mark.parametrize("costs", [[[], []], [[5, 5], [5, 5]], [[100]], [[7], [7], [7]]])
def test_nobody_waits_where_there_is_nothing_to_even_out(costs: list[list[int]]) -> None:
    assert deal_images(costs, parts=1, besides=0) is None


def test_what_is_saved_is_weighed_against_all_that_the_slowest_rank_does() -> None:
    costs = [[10, 10], []]
    worth = int(10 / deal_module.GAIN_MIN)
    assert deal_images(costs, parts=1, besides=worth - 20) is not None
    assert deal_images(costs, parts=1, besides=worth - 19) is None


def test_what_saves_less_than_an_exchange_costs_stays_at_home() -> None:
    costs = [[10, 10], []]
    assert deal_images(costs, parts=1, besides=0, saves_min=10) is not None
    assert deal_images(costs, parts=1, besides=0, saves_min=11) is None


def test_all_images_of_one_rank_are_shared_nearly_evenly() -> None:
    costs = [[cost for cost in range(20, 60) for _ in range(3)], [], [], [], [], [], [], []]
    dealt = deal_images(costs, parts=1, besides=0)
    assert dealt is not None
    mean = sum(costs[0]) / 8
    assert max(dealt.loads(costs)) <= 1.05 * mean


def test_images_stay_at_home_unless_they_have_to_go() -> None:
    """One rank has two too many; of the others' images none moves."""
    costs = [[10] * 6, [10] * 4, [10] * 4, [10] * 2]
    dealt = deal_images(costs, parts=1, besides=0)
    assert dealt is not None
    moved = [(dp, at) for at, images in enumerate(dealt.by_encoder) for dp, _ in images if dp != at]
    assert moved == [(0, 3), (0, 3)]


def test_no_more_images_move_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deal_module, "MOVES_MAX", 3)
    costs = [[1] * 100, []]
    dealt = deal_images(costs, parts=1, besides=0)
    assert dealt is not None
    assert [len(images) for images in dealt.by_encoder] == [97, 3]


def test_images_of_the_smallest_model_stay_at_home_until_an_exchange_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages: Any = Pages(packs=4, seeing=2)
    near = {"parts": 1, "data_ranks": range(2), "tp": 1, "stages": 1, "encoder": 1, "place": 0}
    of_two = Dealing(shape=KIMI_VL_NANO, **cast("Any", near), group=cast("Any", None))
    packs = [[range(2), range(2, 4)]]
    assert of_two.deal(pages, 1, packs) == [None]
    monkeypatch.setattr(dealing_module, "SAVES_MIN", 1)
    (dealt,) = of_two.deal(pages, 1, packs)
    assert dealt is not None
    assert any(home == 0 for home, _ in dealt.deal.by_encoder[1])
