"""The order of a run, for any plan: nothing lost, nothing doubled, weights honoured, the same from anywhere."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.errors import NotSealedError
from polyreme_datahub.index.format import EVEN, WINDOWED
from polyreme_datahub.loader.order import order as order_module
from polyreme_datahub.loader.order.order import Order, longest_prefix, pack
from polyreme_datahub.loader.order.plan import BlockEnds, OrderPlan
from polyreme_datahub.loader.order.slots import Mixture, Slot, permute
from polyreme_planner.mixture import Segment

STEPS = 12
WINDOW_PACKS = 6


@st.composite
def plans(draw: st.DrawFn, *, staged: bool = False) -> OrderPlan:
    """Any plan; ``staged`` ones may have other packs in each segment, and samples that are too long for some."""
    sources = draw(st.integers(1, 4))
    tokens = draw(st.integers(8, 64))
    least = tokens // 6 + 1
    lengths = tuple(
        np.array([least, *draw(st.lists(st.integers(least, tokens), max_size=19))], dtype=np.int64)
        for _ in range(sources)
    )
    packs = st.sampled_from([None, 1, 2, 6]) if staged else st.none()
    shorter = st.sampled_from([None, tokens // 2, tokens // 2, 2 * tokens]) if staged else st.none()
    weights = st.lists(st.integers(0, 9), min_size=sources, max_size=sources).filter(any)
    changes = sorted(draw(st.sets(st.integers(2, STEPS), max_size=3)))
    segments = tuple(
        Segment(
            first_step=step,
            weights=tuple(draw(weights)),
            packs_per_step=draw(packs),
            pack_tokens=draw(shorter),
            answer_room=draw(st.sampled_from([0, 0, tokens // 4])) if staged else 0,
        )
        for step in (1, *changes)
    )
    return OrderPlan(
        seed=draw(st.integers(0, 1000)),
        names=tuple(f"source-{at}" for at in range(sources)),
        lengths=lengths,
        segments=segments,
        packs_per_step=draw(st.sampled_from([1, 2, 3, 9])),
        pack_tokens=tokens,
        version=draw(st.sampled_from([WINDOWED, EVEN])),
    )


def slots_by_step(plan: OrderPlan) -> list[list[list[Slot]]]:
    order = Order(plan, window_packs=WINDOW_PACKS)
    return [order.packs(step) for step in range(1, STEPS + 1)]


@settings(max_examples=25, deadline=None)
@given(plans() | plans(staged=True), st.integers(1, STEPS))
def test_every_step_restores_to_the_same_tail(plan: OrderPlan, step: int) -> None:
    whole = slots_by_step(plan)
    fresh = Order(plan, window_packs=WINDOW_PACKS)
    assert [fresh.packs(at) for at in range(step, STEPS + 1)] == whole[step - 1 :]
    assert fresh.packs(1) == whole[0]


@settings(max_examples=25, deadline=None)
@given(plans() | plans(staged=True), st.integers(1, STEPS))
def test_a_place_leads_to_the_same_tail_without_the_steps_before(plan: OrderPlan, step: int) -> None:
    whole = slots_by_step(plan)
    place = Order(plan, window_packs=WINDOW_PACKS).place(step)
    fresh = Order(plan, window_packs=WINDOW_PACKS)
    assert fresh.jump(place)
    filled: list[int] = []
    fill = fresh._fill

    def noted(window: Any) -> Any:
        filled.append(window.first_step)
        return fill(window)

    fresh._fill = noted  # type: ignore[method-assign]
    assert fresh.packs(step) == whole[step - 1]
    assert set(filled) == {place["step"]}
    assert [fresh.packs(at) for at in range(STEPS, 0, -1)] == whole[::-1]


@settings(max_examples=40, deadline=None)
@given(plans(), st.integers(1, STEPS), st.data())
def test_numbers_that_can_be_no_place_are_not_taken(plan: OrderPlan, step: int, data: st.DataObject) -> None:
    place = Order(plan, window_packs=WINDOW_PACKS).place(step)
    name = data.draw(st.sampled_from(sorted(place)))
    wrong: object = data.draw(st.sampled_from([None, -1, 1.0, True, "1", [], 10**9 + 1 if name == "segment" else {}]))
    order = Order(plan, window_packs=WINDOW_PACKS)
    assert not order.jump({**place, name: wrong})
    assert not order.jump({})
    assert order.packs(step) == slots_by_step(plan)[step - 1]


@settings(max_examples=10, deadline=None)
@given(plans())
def test_beginnings_in_memory_are_bounded_and_the_packs_stay(plan: OrderPlan) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(order_module, "WINDOWS_KNOWN_MAX", 3)
        order = Order(plan, window_packs=1)
        steps = [*range(1, STEPS + 1), *range(STEPS, 0, -1)]
        packs = [order.packs(step) for step in steps]
        assert len(order._known) <= 3
        assert order._known[0].first_step == 1
    small = Order(plan, window_packs=1)
    assert packs == [small.packs(step) for step in steps]


@settings(max_examples=25, deadline=None)
@given(plans() | plans(staged=True))
def test_no_pack_overflows_and_every_step_has_all_its_packs(plan: OrderPlan) -> None:
    for step, packs in enumerate(slots_by_step(plan), start=1):
        segment = next(of for of in reversed(plan.segments) if of.first_step <= step)
        assert plan.segment_of(step) == segment
        assert len(packs) == (segment.packs_per_step or plan.packs_per_step)
        for slots in packs:
            tokens = segment.pack_tokens or plan.pack_tokens
            took = sum(int(plan.lengths[slot.source][slot.sample]) + segment.answer_room for slot in slots)
            assert took <= tokens


@settings(max_examples=40, deadline=None)
@given(plans(staged=True))
def test_a_change_of_packs_doubles_no_sample_of_an_epoch(plan: OrderPlan) -> None:
    seen = Counter((s.source, s.epoch, s.sample) for packs in slots_by_step(plan) for p in packs for s in p)
    assert set(seen.values()) <= {1}


def test_a_stage_of_longer_packs_begins_an_epoch_of_all_that_fit() -> None:
    segments = (
        Segment(first_step=1, weights=(1,)),
        Segment(first_step=4, weights=(1,), packs_per_step=1, pack_tokens=100),
    )
    lengths = (np.array([10, 10, 10, 90, 60]),)
    plan = OrderPlan(seed=3, names=("s",), lengths=lengths, segments=segments, packs_per_step=2, pack_tokens=20)
    slots = [[slot for packs in step for slot in packs] for step in slots_by_step(plan)]
    short, long = [slot for step in slots[:3] for slot in step], [slot for step in slots[3:] for slot in step]
    assert {slot.sample for slot in short} == {0, 1, 2}, "the long ones have no turn"
    first = max(slot.epoch for slot in short) + 1
    assert min(slot.epoch for slot in long) == first
    assert {slot.sample for slot in long if slot.epoch == first} == {0, 1, 2, 3, 4}


@settings(max_examples=25, deadline=None)
@given(plans())
def test_each_sample_comes_once_an_epoch(plan: OrderPlan) -> None:
    order = Order(plan, window_packs=WINDOW_PACKS)
    seen = Counter((s.source, s.epoch, s.sample) for step in range(1, STEPS + 1) for p in order.packs(step) for s in p)
    assert set(seen.values()) <= {1}
    last_step = order._find(STEPS).first_step
    whole = Counter((s.source, s.epoch, s.sample) for step in range(1, last_step) for p in order.packs(step) for s in p)
    for source, lengths in enumerate(plan.lengths):
        per_epoch = Counter(epoch for at, epoch, _ in whole if at == source)
        newest = max(per_epoch, default=0)
        assert all(per_epoch[epoch] == lengths.size for epoch in range(newest))


@settings(max_examples=25, deadline=None)
@given(plans())
def test_windows_take_slots_without_gap_and_conserve_tokens(plan: OrderPlan) -> None:
    order = Order(plan, window_packs=WINDOW_PACKS)
    order.packs(STEPS)
    for window, following in pairwise(order._known):
        filled = order._fill(window)
        packs, (end, _) = filled.packs, filled.place
        used = sum(map(len, packs))
        slots, lengths, _ = order._slots.read(window.segment, (window.slot, window.base), used)
        placed = [slot for pack_ in packs for slot in pack_]
        assert sorted(map(key, placed)) == sorted(map(key, slots))
        assert sum(int(plan.lengths[s.source][s.sample]) for s in placed) == int(lengths.sum())
        if following.segment == window.segment:
            assert following.slot == end == window.slot + used


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 40), min_size=1, max_size=6).filter(any), st.integers(0, 300))
def test_every_prefix_of_the_mixture_is_within_one_sample(weights: list[int], count: int) -> None:
    mixture = Mixture(weights)
    sources = mixture.sources(0, count).tolist()
    total = sum(weights)
    taken = [0] * len(weights)
    for slot, source in enumerate(sources, start=1):
        taken[source] += 1
        for mine, weight in zip(taken, weights, strict=True):
            assert abs(mine * total - weight * slot) < total
    assert mixture.taken(count) == taken


@given(st.integers(1, 3000), st.text(max_size=8))
def test_a_permutation_hits_every_place_once(size: int, key_text: str) -> None:
    order = permute(np.arange(size), size=size, key=key_text)
    assert np.array_equal(np.sort(order), np.arange(size))
    some = permute(np.arange(size)[::3], size=size, key=key_text)
    assert np.array_equal(some, order[::3])


@given(st.lists(st.integers(1, 50), max_size=80), st.integers(50, 90), st.integers(1, 20))
def test_a_prefix_fills_its_packs_and_loses_nothing(lengths: list[int], capacity: int, packs_max: int) -> None:
    count, packs = longest_prefix(lengths, capacity=capacity, packs_max=packs_max)
    assert len(packs) <= packs_max
    assert sorted(sample for samples in packs for sample in samples) == list(range(count))
    assert all(sum(lengths[sample] for sample in samples) <= capacity for samples in packs)
    if count < len(lengths):
        assert count >= packs_max
    assert pack(lengths[:count], capacity=capacity) == packs


def key(slot: Slot) -> tuple[int, int, int]:
    return slot.source, slot.epoch, slot.sample


@st.composite
def block_sizes(draw: st.DrawFn, plan: OrderPlan) -> list[list[int]]:
    """Cut each source of a plan into blocks; some may be empty."""
    found = []
    for lengths in plan.lengths:
        cuts = sorted(draw(st.lists(st.integers(0, lengths.size), max_size=5)))
        found.append([int(size) for size in np.diff([0, *cuts, lengths.size])])
    return found


def sealed(plan: OrderPlan, sizes: list[list[int]], counts: list[int]) -> OrderPlan:
    """The plan as it is known when so many blocks of each source are sealed."""
    ends = [tuple(itertools.accumulate(of[:count])) for of, count in zip(sizes, counts, strict=True)]
    lengths = tuple(of[: (end or (0,))[-1]] for of, end in zip(plan.lengths, ends, strict=True))
    blocks = tuple(BlockEnds(end, len(of)) for end, of in zip(ends, sizes, strict=True))
    return dataclasses.replace(plan, lengths=lengths, blocks=blocks)


@settings(max_examples=40, deadline=None)
@given(plans(), st.data())
def test_the_order_does_not_depend_on_how_many_blocks_are_sealed(plan: OrderPlan, data: st.DataObject) -> None:
    sizes = data.draw(block_sizes(plan))
    totals = [len(of) for of in sizes]
    whole_order = Order(sealed(plan, sizes, totals), window_packs=WINDOW_PACKS)
    whole = [whole_order.packs(step) for step in range(1, STEPS + 1)]
    counts = [0] * len(sizes)
    order = Order(sealed(plan, sizes, counts), window_packs=WINDOW_PACKS)
    step, places = 1, []
    while step <= STEPS:
        try:
            assert order.packs(step) == whole[step - 1]
            assert order.blocks_before(step) == whole_order.blocks_before(step)
            places.append(order.place(step))
            step += 1
        except NotSealedError:
            left = [at for at, count in enumerate(counts) if count < totals[at]]
            assert left, "everything is sealed"
            counts[data.draw(st.sampled_from(left))] += 1
            if data.draw(st.booleans()):
                order.extend(sealed(plan, sizes, counts))
            else:
                order = Order(sealed(plan, sizes, counts), window_packs=WINDOW_PACKS)
                assert not places or order.jump(places[-1])


@settings(max_examples=25, deadline=None)
@given(plans(), st.data())
def test_the_first_epoch_takes_the_blocks_in_order_and_every_epoch_each_sample_once(
    plan: OrderPlan, data: st.DataObject
) -> None:
    sizes = data.draw(block_sizes(plan))
    order = Order(sealed(plan, sizes, [len(of) for of in sizes]), window_packs=1)
    epochs: dict[tuple[int, int], list[int]] = {}
    for step in range(1, STEPS + 1):
        packed = [slot for slots in order.packs(step) for slot in slots]
        for source in range(len(sizes)):
            turns = sorted((of.epoch, of.sample) for of in packed if of.source == source)
            for epoch, sample in turns:
                epochs.setdefault((source, epoch), []).append(sample)
    for (source, epoch), samples in epochs.items():
        assert len(set(samples)) == len(samples)
        if (source, epoch + 1) in epochs:
            assert sorted(samples) == list(range(plan.lengths[source].size))
        edges = np.cumsum(sizes[source])
        begun = int(np.searchsorted(edges, max(samples), side="right"))
        if epoch == 0 and begun:
            assert set(range(int(edges[begun - 1]))) <= {*samples}, "blocks before the newest one are read whole"
