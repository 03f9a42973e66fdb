"""How often samples are visited: after any step, two samples of a source differ by at most one visit."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_datahub.index.format import EVEN, WINDOWED
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.outlook import Visits, outlook_with_visits
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_planner.mixture import Segment
from tests.property.datahub.test_mixture_size_properties import limited
from tests.property.datahub.test_order_properties import STEPS, WINDOW_PACKS, block_sizes, plans, sealed


def visits_by_step(plan: OrderPlan, order: Order, steps: int) -> Iterator[list[npt.NDArray[np.int64]]]:
    visits = [np.zeros(lengths.size, np.int64) for lengths in plan.lengths]
    for step in range(1, steps + 1):
        for slots in order.packs(step):
            for slot in slots:
                visits[slot.source][slot.sample] += 1
        yield visits


def assert_even(plan: OrderPlan, order: Order, steps: int = STEPS) -> None:
    for visits in visits_by_step(plan, order, steps):
        assert all(of.max() - of.min() <= 1 for of in visits)


@settings(max_examples=30, deadline=None)
@given(plans() | limited(), st.data())
def test_after_any_step_two_samples_of_a_source_differ_by_at_most_one_visit(
    plan: OrderPlan, data: st.DataObject
) -> None:
    """Over sizes, weights and their changes, limits of epochs, and blocks."""
    plan = dataclasses.replace(plan, version=EVEN)
    tokens = {plan.sample_tokens_in(segment) for segment in plan.segments}
    if len(tokens) > 1:
        plan = dataclasses.replace(plan, segments=plan.segments[:1])
    fitting = [lengths[lengths <= plan.sample_tokens_in(plan.segments[0])] for lengths in plan.lengths]
    plan = dataclasses.replace(plan, lengths=tuple(fitting))
    if not plan.epochs_max and data.draw(st.booleans()):
        sizes = data.draw(block_sizes(plan))
        plan = sealed(plan, sizes, [len(of) for of in sizes])
    assert_even(plan, Order(plan, window_packs=WINDOW_PACKS))


@settings(max_examples=15, deadline=None)
@given(plans(staged=True))
def test_each_change_of_what_fits_adds_at_most_one_visit(plan: OrderPlan) -> None:
    """An epoch of other samples begins there, and the one before it is left unfinished."""
    plan = dataclasses.replace(plan, version=EVEN)
    order = Order(plan, window_packs=WINDOW_PACKS)
    always = [lengths <= min(plan.sample_tokens_in(segment) for segment in plan.segments) for lengths in plan.lengths]
    for step, visits in enumerate(visits_by_step(plan, order, STEPS), start=1):
        tokens = [plan.sample_tokens_in(segment) for segment in plan.segments if segment.first_step <= step]
        changes = sum(one != other for one, other in pairwise(tokens))
        for of, fits in zip(visits, always, strict=True):
            assert not fits.any() or of[fits].max() - of[fits].min() <= 1 + changes


@settings(max_examples=12, deadline=None)
@given(st.lists(st.integers(1, 700), min_size=1, max_size=4), st.sampled_from([1, 4, 8, 300]), st.data())
def test_windows_of_their_real_size_end_with_the_epochs(sizes: list[int], packs: int, data: st.DataObject) -> None:
    weights = tuple(data.draw(st.integers(1, 9)) for _ in sizes)
    plan = plan_of(sizes, weights, packs=packs)
    assert_even(plan, Order(plan), steps=data.draw(st.integers(1, 1 + 400 // packs)))


@pytest.mark.parametrize(("samples", "packs"), [(100, 4), (500, 8), (2000, 8)])
@pytest.mark.parametrize("epochs", [1, 3])
def test_a_run_of_whole_epochs_leaves_no_sample_out(samples: int, packs: int, epochs: int) -> None:
    """Before, packs of many epochs were shuffled together: of 100 samples, 75 were never seen in three steps."""
    plan = plan_of([samples], (1,), packs=packs)
    # Packs have small gaps: up to 2 % with so few of them.
    steps = int(plan.lengths[0].sum() * epochs * 1.02) // (plan.pack_tokens * packs) + 1
    visits = [of[0] for of in visits_by_step(plan, Order(plan), steps)][-1]
    assert set(visits.tolist()) <= {epochs, epochs + 1}


@settings(max_examples=15, deadline=None)
@given(plans() | plans(staged=True))
def test_the_visits_that_are_shown_are_those_of_the_order(plan: OrderPlan) -> None:
    """At the end of each segment, of the samples that fit some segment so far."""
    counted = dict(enumerate((tuple(map(np.copy, of)) for of in visits_by_step(plan, Order(plan), STEPS)), start=1))
    usable = [np.zeros(lengths.size, bool) for lengths in plan.lengths]
    for row, segment in zip(outlook_with_visits(plan, STEPS), plan.segments, strict=True):
        for source, of in enumerate(row.sources):
            if segment.weights[source]:
                usable[source] |= plan.lengths[source] <= plan.sample_tokens_in(segment)
            visits = counted[row.last_step][source][usable[source]].tolist()
            assert of.visits == Visits(
                least=min(visits, default=0), most=max(visits, default=0), unseen=visits.count(0)
            )


def test_visits_of_a_long_run_follow_from_its_epochs() -> None:
    plan = plan_of([1000, 400_000], (1, 9), packs=8)
    [row] = outlook_with_visits(plan, 10_000)
    small, large = (of.visits for of in row.sources)
    assert small is not None
    assert large is not None
    assert (small.exact, large.exact) == (False, False)
    assert small.most == small.least + 1 > 1
    assert (small.unseen, large.unseen) == (0, 0)
    [row] = outlook_with_visits(plan, 5000)
    visits, epochs = row.sources[1].visits, row.sources[1].epochs
    assert visits is not None
    assert 0 < epochs < 1
    assert not visits.exact
    assert visits.unseen == pytest.approx(400_000 * (1 - epochs), abs=1)


def test_a_job_that_began_with_an_earlier_release_keeps_its_order() -> None:
    """The digest is that of the release whose plans do not say how windows are cut."""
    plan = plan_of([40, 300, 7], (3, 2, 1), packs=8)
    order = Order(dataclasses.replace(plan, version=WINDOWED))
    packs = [[[dataclasses.astuple(slot) for slot in slots] for slots in order.packs(step)] for step in range(1, 41)]
    digest = hashlib.sha256(json.dumps(packs).encode()).hexdigest()
    assert digest == "4e815bc13355fab9fe5bc923e659daaa26ab0c977dd516d06fe2a5a3a679fb82"


def plan_of(sizes: list[int], weights: tuple[int, ...], *, packs: int) -> OrderPlan:
    lengths = tuple(
        np.array([300 + at * (source + 7919) % 1200 for at in range(of)]) for source, of in enumerate(sizes)
    )
    return OrderPlan(
        seed=1,
        names=tuple(f"s{source}" for source in range(len(sizes))),
        lengths=lengths,
        segments=(Segment(first_step=1, weights=weights),),
        packs_per_step=packs,
        pack_tokens=8192,
    )
