"""Balancing images over ranks: none is lost or doubled, the slowest rank gets faster, and all features return."""

from __future__ import annotations

import copy
import itertools
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.parallel import image_balancing as balancing
from polyreme_trainer.parallel.image_balancing import ImageAssignment, balance_images, held_after_tower, return_route
from polyreme_trainer.parallel.images import share_images
from polyreme_trainer.train import image_assignment as dealing_module
from polyreme_trainer.train.image_assignment import ImageBalancer
from tests.parallel.pages import Pages

cells_by_rank = st.lists(st.lists(st.integers(1, 40), max_size=12), min_size=1, max_size=6)
parts_of = st.integers(1, 3)
besides_of = st.integers(0, 2000)


def costs_of(cells: list[list[int]]) -> list[list[int]]:
    return [[count * (30 + count) for count in own] for own in cells]


def owner_loads(costs: list[list[int]], parts: int) -> list[int]:
    return [sum(own[image] for image in share) for own in costs for share in share_images(own, parts)]


def forced(cells: list[list[int]], parts: int) -> ImageAssignment:
    """An assignment even if none is worth it: every image moves one encoder on."""
    owners = [[0] * len(own) for own in cells]
    encoders: list[list[tuple[int, int]]] = [[] for _ in range(len(cells) * parts)]
    for dp, own in enumerate(costs_of(cells)):
        for part, share in enumerate(share_images(own, parts)):
            for image in share:
                owners[dp][image] = dp * parts + part
                encoders[(dp * parts + part + image % 2) % len(encoders)].append((dp, image))
    return ImageAssignment(owners=tuple(map(tuple, owners)), by_encoder=tuple(map(tuple, encoders)))


@given(cells_by_rank, parts_of, besides_of)
def test_a_deal_keeps_every_image_once_and_makes_the_slowest_rank_faster(
    cells: list[list[int]], parts: int, other_flops: int
) -> None:
    costs = costs_of(cells)
    balanced = balance_images(costs, parts=parts, other_flops=other_flops)
    before = owner_loads(costs, parts)
    if balanced is None:
        return
    seen = sorted(itertools.chain(*balanced.by_encoder))
    assert seen == [(dp, number) for dp, own in enumerate(cells) for number in range(len(own))]
    after = balanced.loads(costs)
    assert sum(after) == sum(before)
    assert max(before) - max(after) >= balancing.GAIN_MIN * (other_flops + max(before)), "less is worth no exchange"
    remote_images = sum(
        balanced.owner_of(image) != at for at, images in enumerate(balanced.by_encoder) for image in images
    )
    assert 0 < remote_images <= balancing.MOVES_MAX
    for encoder, images in enumerate(balanced.by_encoder):
        own = [image for image in images if image[0] == encoder // parts]
        assert list(images[: len(own)]) == sorted(own), "a rank's own stand first, in order"
        assert list(images[len(own) :]) == sorted(images[len(own) :])
    assert balance_images(copy.deepcopy(costs), parts=parts, other_flops=other_flops) == balanced, (
        "every rank has the same"
    )


@given(cells_by_rank, parts_of, besides_of)
def test_images_stay_at_home_only_where_moving_any_would_not_pay(
    cells: list[list[int]], parts: int, other_flops: int
) -> None:
    """Without balancing, no first move from the fullest to the emptiest gains twice what is asked for."""
    costs = costs_of(cells)
    if balance_images(costs, parts=parts, other_flops=other_flops) is not None:
        return
    loads = owner_loads(costs, parts)
    fullest, emptiest = loads.index(max(loads)), loads.index(min(loads))
    worth = max(1, balancing.GAIN_MIN * (other_flops + max(loads)))
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
    balanced = (balance_images(costs_of(cells), parts=parts, other_flops=0) if worth else None) or forced(cells, parts)
    for place in range(tp):
        ways = [
            return_route(balanced, cells, encoder, tp=tp, place=place, lost=frozenset(lost))
            for encoder in range(len(cells) * parts)
        ]
        made = [
            np.array(
                [
                    (*held.image, cell)
                    for held in held_after_tower(balanced, cells, encoder, tp=tp, place=place)
                    for cell in held.cells
                ],
                np.int64,
            ).reshape(-1, 3)
            for encoder in range(len(ways))
        ]
        letters = [np.split(rows[way.leaving], np.cumsum(way.sent)[:-1]) for rows, way in zip(made, ways, strict=True)]
        for owner, way in enumerate(ways):
            came = [letters[sender][owner] for sender in range(len(ways))]
            assert [len(rows) for rows in came] == way.received
            here = np.concatenate([made[owner][way.kept], *came])[way.order]
            own = cells[owner // parts]
            first = np.cumsum([0, *(0 if image in lost else count for image, count in enumerate(own))])
            assert [int(first[image] + cell) for _, image, cell in here] == way.rows.tolist()
            assert all(dp == owner // parts and image not in lost for dp, image, _ in here)
            assert (np.diff(way.rows) > 0).all()
    for dp, own in enumerate(cells):
        rows = [
            return_route(balanced, cells, dp * parts + part, tp=tp, place=place, lost=frozenset(lost)).rows
            for part in range(parts)
            for place in range(tp)
        ]
        tokens = sum(count for image, count in enumerate(own) if image not in lost)
        assert sorted(np.concatenate(rows)) == list(range(tokens)), "each media token has its feature, on one rank"


@pytest.mark.parametrize("costs", [[[], []], [[5, 5], [5, 5]], [[100]], [[7], [7], [7]]])
def test_no_exchange_when_there_is_nothing_to_balance(costs: list[list[int]]) -> None:
    assert balance_images(costs, parts=1, other_flops=0) is None


def test_what_is_saved_is_weighed_against_all_that_the_slowest_rank_does() -> None:
    costs = [[10, 10], []]
    worth = int(10 / balancing.GAIN_MIN)
    assert balance_images(costs, parts=1, other_flops=worth - 20) is not None
    assert balance_images(costs, parts=1, other_flops=worth - 19) is None


def test_what_saves_less_than_an_exchange_costs_stays_at_home() -> None:
    costs = [[10, 10], []]
    assert balance_images(costs, parts=1, other_flops=0, saves_min=10) is not None
    assert balance_images(costs, parts=1, other_flops=0, saves_min=11) is None


def test_all_images_of_one_rank_are_shared_nearly_evenly() -> None:
    costs = [[cost for cost in range(20, 60) for _ in range(3)], [], [], [], [], [], [], []]
    balanced = balance_images(costs, parts=1, other_flops=0)
    assert balanced is not None
    mean = sum(costs[0]) / 8
    assert max(balanced.loads(costs)) <= 1.05 * mean


def test_images_stay_at_home_unless_they_have_to_go() -> None:
    """One rank has two too many; of the others' images none moves."""
    costs = [[10] * 6, [10] * 4, [10] * 4, [10] * 2]
    balanced = balance_images(costs, parts=1, other_flops=0)
    assert balanced is not None
    moved = [(dp, at) for at, images in enumerate(balanced.by_encoder) for dp, _ in images if dp != at]
    assert moved == [(0, 3), (0, 3)]


def test_no_more_images_move_than_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(balancing, "MOVES_MAX", 3)
    costs = [[1] * 100, []]
    balanced = balance_images(costs, parts=1, other_flops=0)
    assert balanced is not None
    assert [len(images) for images in balanced.by_encoder] == [97, 3]


def test_images_of_the_smallest_model_stay_at_home_until_an_exchange_costs_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pages: Any = Pages(packs=4, seeing=2)
    near = {"parts": 1, "data_ranks": range(2), "tp": 1, "stages": 1, "encoder": 1, "place": 0}
    of_two = ImageBalancer(shape=KIMI_VL_NANO, **cast("Any", near), group=cast("Any", None))
    packs = [[range(2), range(2, 4)]]
    assert of_two.assign(pages, 1, packs) == [None]
    monkeypatch.setattr(dealing_module, "SAVES_MIN", 1)
    (balanced,) = of_two.assign(pages, 1, packs)
    assert balanced is not None
    assert any(owner == 0 for owner, _ in balanced.assignment.by_encoder[1])
