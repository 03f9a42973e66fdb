"""Weights by what sources hold, and limits of epochs: exact where they say so, the same from anywhere."""

from __future__ import annotations

import dataclasses
from collections import Counter
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from polyreme_api.job.data import Data
from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.outlook import outlook, used_up_step
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_datahub.loader.order.weighing import PERIOD, weighed
from polyreme_planner.mixture import Segment
from tests.property.datahub.test_order_properties import STEPS, WINDOW_PACKS, plans, slots_by_step


def data_of(**given: Any) -> Data:
    sources = [{"name": "a", "dataset": "a"}]
    return Data.model_validate({"sources": sources, "sequenceTokens": 64, **given})


def plan_of(lengths: list[list[int]], *weights: tuple[int, list[int]], **given: Any) -> OrderPlan:
    segments = tuple(Segment(first_step=step, weights=tuple(of)) for step, of in weights)
    names = tuple(f"s{at}" for at in range(len(lengths)))
    arrays = tuple(np.array(of, np.int64) for of in lengths)
    return OrderPlan(seed=3, names=names, lengths=arrays, segments=segments, packs_per_step=4, pack_tokens=64, **given)


@st.composite
def limited(draw: st.DrawFn) -> OrderPlan:
    """Any plan in which some sources have limits, and one has none; also of stages with other packs."""
    plan = draw(plans() | plans(staged=True))
    limits = [draw(st.none() | st.integers(1, 3)) for _ in plan.names]
    limits[draw(st.integers(0, len(limits) - 1))] = 1
    # Whatever has no limit weighs something everywhere: the data last.
    open_source = draw(st.integers(0, len(limits) - 1))
    segments = [
        dataclasses.replace(of, weights=tuple(w + (at == open_source) for at, w in enumerate(of.weights)))
        for of in plan.segments
    ]
    limits[open_source] = None
    assume(any(limits))
    return dataclasses.replace(plan, segments=tuple(segments), epochs_max=tuple(limits), last_step=STEPS)


@settings(max_examples=30, deadline=None)
@given(limited())
def test_no_sample_is_trained_on_more_often_than_its_source_allows(plan: OrderPlan) -> None:
    visits = Counter((s.source, s.sample) for packs in slots_by_step(plan) for pack in packs for s in pack)
    for (source, _), count in visits.items():
        most = plan.epochs_max[source]
        assert most is None or count <= most


@settings(max_examples=30, deadline=None)
@given(limited(), st.integers(1, STEPS))
def test_a_place_leads_to_the_same_tail_behind_the_end_of_a_source(plan: OrderPlan, step: int) -> None:
    whole = slots_by_step(plan)
    fresh = Order(plan, window_packs=WINDOW_PACKS)
    assert fresh.jump(Order(plan, window_packs=WINDOW_PACKS).place(step))
    # A walk from the first step is not what it goes by.
    fresh._known = fresh._known[-1:]
    assert [fresh.packs(at) for at in range(step, STEPS + 1)] == whole[step - 1 :]


@settings(max_examples=30, deadline=None)
@given(limited())
def test_a_source_that_ends_gives_all_its_epochs_and_its_turns_to_the_others(plan: OrderPlan) -> None:
    """Of one mixture: until the first source ends, its order is that of a run without limits."""
    plan = dataclasses.replace(plan, segments=plan.segments[:1])
    free = Order(dataclasses.replace(plan, epochs_max=()), window_packs=WINDOW_PACKS)
    order = Order(plan, window_packs=WINDOW_PACKS)
    start = (0, (0,) * len(plan.names))
    slots, _, stretches = order._slots.read(0, start, 400)
    same, _, _ = free._slots.read(0, start, 400)
    first = stretches[1].first if len(stretches) > 1 else len(slots)
    assert slots[:first] == same[:first]
    counts = Counter(slot.source for slot in slots)
    for source, weight in enumerate(plan.segments[0].weights):
        left = order._slots._left(0, source, stretches[-1].base)
        if left == 0 and weight:
            limit = plan.epochs_max[source]
            assert limit is not None
            assert counts[source] == limit * order._slots.size(0, source)
    for stretch, following in pairwise(stretches):
        part = Counter(slot.source for slot in slots[stretch.first : following.first])
        live = [order._slots._left(0, at, stretch.base) != 0 for at in range(len(plan.names))]
        weights = [w if on else 0 for w, on in zip(plan.segments[0].weights, live, strict=True)]
        for source, weight in enumerate(weights):
            assert abs(part[source] - weight / sum(weights) * part.total()) < 1


LENGTHS = st.lists(st.lists(st.integers(4, 64), min_size=1, max_size=60), min_size=1, max_size=4)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.data())
def test_data_with_a_limit_lasts_for_all_steps_or_is_reported(lengths: list[list[int]], data: st.DataObject) -> None:
    """All sources have a limit, and one mixture: what is left is known to the token."""
    limits = tuple(data.draw(st.integers(1, 4)) for _ in lengths)
    weights = [data.draw(st.integers(1, 5)) for _ in lengths]
    plan = plan_of(lengths, (1, weights), epochs_max=limits, last_step=STEPS)
    tokens = sum(limit * sum(of) for limit, of in zip(limits, lengths, strict=True))
    used_up = used_up_step(plan, STEPS)
    step_tokens = plan.packs_per_step * plan.pack_tokens
    assert (used_up is None) == (tokens >= (STEPS + 1) * step_tokens) or abs(tokens / step_tokens - STEPS - 1) < 0.2
    if used_up is None:
        order = Order(plan, window_packs=WINDOW_PACKS)
        # A pack may be empty where the next samples fill more packs than a window has left, with and without limits.
        assert all(any(order.packs(step)) for step in range(1, STEPS + 1))
        assert not any(order.packs(STEPS + 50)), "who looks ahead finds nothing there"
    else:
        assert abs(used_up - min(STEPS, 1 + tokens // step_tokens)) <= 1


def test_steps_behind_the_last_epoch_are_an_error_that_says_which_limits_to_raise() -> None:
    plan = plan_of([[32] * 10], (1, [1]), epochs_max=(2,), last_step=STEPS)
    order = Order(plan, window_packs=WINDOW_PACKS)
    with pytest.raises(SourceInvalidError, match=r"used up at about step 4: .*\(s0 2\); raise or drop an epochsMax"):
        order.packs(STEPS)


def test_a_change_behind_the_last_step_may_have_nothing_left() -> None:
    plan = plan_of([[32] * 10, [32] * 10], (1, [1, 1]), (30, [1, 0]), epochs_max=(2, None), last_step=STEPS)
    assert used_up_step(plan, STEPS) is None
    assert not any(Order(plan, window_packs=WINDOW_PACKS).packs(30))


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.data())
def test_weights_of_tokens_are_shares_of_the_tokens(lengths: list[list[int]], data: st.DataObject) -> None:
    weights = [data.draw(st.integers(1, 9)) for _ in lengths]
    plan = weighed(plan_of(lengths, (1, weights)), data_of(weightsBy="Tokens"))
    [segment] = outlook(plan, 100)
    for source, weight in zip(segment.sources, weights, strict=True):
        assert source.tokens_ratio == pytest.approx(weight / sum(weights), rel=0.02, abs=1e-4)
    found = plan.segments[0].weights
    assert abs(sum(found) - PERIOD) <= len(found)


@settings(max_examples=40, deadline=None)
@given(LENGTHS, st.sampled_from(["Samples", "Tokens"]))
def test_at_temperature_one_every_sample_comes_as_often(lengths: list[list[int]], by: str) -> None:
    plan = weighed(plan_of(lengths, (1, [1] * len(lengths))), data_of(weightsBy=by, temperature="1"))
    sizes = [len(of) for of in lengths]
    for weight, size in zip(plan.segments[0].weights, sizes, strict=True):
        assert weight == pytest.approx(size / sum(sizes) * PERIOD, abs=1)


def test_a_temperature_lies_between_the_sizes_and_the_weights() -> None:
    plan = plan_of([[10] * 900, [10] * 100], (1, [1, 1]), (5, [0, 1]))
    shares = []
    for temperature in ("1", "2", "100"):
        first, second = weighed(plan, data_of(temperature=temperature)).segments
        shares.append(first.weights[0] / sum(first.weights))
        assert second.weights == (0, PERIOD)
    assert shares == pytest.approx([0.9, 0.75, 0.5055], abs=1e-3)
    assert weighed(plan, data_of()) is plan


def test_the_whole_weights_are_the_same_on_every_machine() -> None:
    lengths = [[7] * 123_457, [11] * 1009, [64] * 3]
    plan = weighed(plan_of(lengths, (1, [3, 2, 1])), data_of(weightsBy="Tokens", temperature="3.3"))
    assert plan.segments[0].weights == (58_713, 6656, 167)


@settings(max_examples=15, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), min_size=1, max_size=20), min_size=2, max_size=4), st.data())
def test_what_is_said_of_a_run_is_what_its_order_does(short: list[list[int]], data: st.DataObject) -> None:
    """Samples are short, so packs have no gaps, and many, so means hold."""
    lengths = [of * 20 for of in short]
    limits = (None, *(data.draw(st.none() | st.integers(1, 4)) for _ in short[1:]))
    entries = [(1, [1, *data.draw(st.lists(st.integers(0, 5), min_size=len(short) - 1, max_size=len(short) - 1))])]
    entries += [(33, [data.draw(st.integers(1, 5)) for _ in short])]
    plan = plan_of(lengths, *entries, epochs_max=limits, last_step=64)
    order = Order(plan, window_packs=16)
    turns: Counter[int] = Counter()
    for row in outlook(plan, 64):
        slots = [s for step in range(row.first_step, row.last_step + 1) for pack in order.packs(step) for s in pack]
        counts = Counter(slot.source for slot in slots)
        turns += counts
        for at, source in enumerate(row.sources):
            assert source.samples_ratio == pytest.approx(counts[at] / len(slots), abs=0.03)
            assert source.epochs == pytest.approx(turns[at] / len(lengths[at]), rel=0.05, abs=0.05)
            limit = limits[at]
            ended = limit is not None and turns[at] == limit * len(lengths[at]) and counts[at] > 0
            assert (source.ends_step is not None) == ended or abs(source.epochs - (limit or 0)) < 0.1
