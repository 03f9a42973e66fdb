"""The number of steps of epochs: every sample is visited so often after them, and not before."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.loader.order.epochs import steps_of_epochs
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import OrderPlan
from polyreme_planner.mixture import Segment

TOKENS = 32


def plan_of(sizes: list[int], segments: list[tuple[int, list[int]]], *, packs: int) -> OrderPlan:
    """Samples of 3 to 35 tokens: some do not fit the packs."""
    return OrderPlan(
        seed=5,
        names=tuple(f"s{at}" for at in range(len(sizes))),
        lengths=tuple(np.array([3 + (7 * at + size) % 33 for at in range(size)]) for size in sizes),
        segments=tuple(Segment(first_step=first, weights=tuple(weights)) for first, weights in segments),
        packs_per_step=packs,
        pack_tokens=TOKENS,
    )


@settings(max_examples=25, deadline=None)
@given(
    sizes=st.lists(st.integers(5, 60), min_size=1, max_size=3),
    weights=st.lists(st.integers(0, 3), min_size=3, max_size=3),
    later=st.lists(st.integers(1, 3), min_size=3, max_size=3),
    change=st.integers(2, 9),
    packs=st.sampled_from([1, 3, 16, 64]),
    epochs=st.integers(1, 3),
)
def test_the_steps_of_epochs_are_the_fewest_after_which_all_samples_were_visited_so_often(
    sizes: list[int], weights: list[int], later: list[int], change: int, packs: int, epochs: int
) -> None:
    first = weights[: len(sizes)]
    segments = [(1, first), (change, later[: len(sizes)])] if any(first) else [(1, later[: len(sizes)])]
    plan = plan_of(sizes, segments, packs=packs)
    steps = steps_of_epochs(plan, epochs)
    order, seen = Order(plan), Counter[tuple[int, int]]()
    enough: int | None = None
    wanted = {(at, sample) for at, of in enumerate(plan.lengths) for sample in np.flatnonzero(of <= TOKENS).tolist()}
    for step in range(1, steps + 1):
        if enough is None and all(seen[one] >= epochs for one in wanted):
            enough = step - 1
        seen.update((slot.source, slot.sample) for slots in order.packs(step) for slot in slots)
    assert all(seen[one] >= epochs for one in wanted)
    assert enough is None, "fewer steps would do"


def test_steps_that_can_not_be_counted_are_refused() -> None:
    with pytest.raises(SourceInvalidError, match=r"source 's1' has weight 0 from step 2 on, before its samples were"):
        steps_of_epochs(plan_of([50, 50], [(1, [1, 1]), (2, [1, 0])], packs=1), 2)
    with pytest.raises(SourceInvalidError, match=r"visits of samples, and at most 50,000,000 are counted"):
        steps_of_epochs(plan_of([50, 50], [(1, [1, 60_000])], packs=1), 1000)
