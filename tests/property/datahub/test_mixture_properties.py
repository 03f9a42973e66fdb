"""Changes appended to the schedule of a job that has run: no earlier step is altered, whatever comes later."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.index.format import EVEN, WINDOWED
from polyreme_datahub.loader.open import _without_vain_changes
from polyreme_datahub.loader.order.identity import identity_of_order
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import Identity, OrderPlan
from polyreme_datahub.loader.order.slots import Slot
from polyreme_planner.mixture import (
    first_mixture,
    mixture_changes,
    next_mixture,
    restored_mixture,
    segments_of,
    window_border,
)
from polyreme_planner.rollback import rejection_of, with_rejection
from tests.unit.datahub.jobs import make_spec

STEPS, SOURCES, PACK_TOKENS = 20, 3, 16
PACKS = (64, 96)
"""Of a step, before and in the second stage: windows of 4 and of 2 steps."""
STAGED = 13
LENGTHS = tuple(np.array([3 + (at * (source + 2)) % 13 for at in range(40)]) for source in range(SOURCES))
QUICK = settings(max_examples=10, deadline=None, phases=[phase for phase in Phase if phase is not Phase.shrink])
"""Each example orders some thousands of samples: a smaller one is not worth the wait."""
weights = st.lists(st.integers(0, 5), min_size=SOURCES, max_size=SOURCES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
    """A job's attempts: what each knew of the schedule, and what it was to train by."""

    specs: list[TrainingJobSpec]
    records: list[MixtureRecord]
    resumed: list[int]


def spec_of(
    schedule: list[tuple[int, list[int]]], *, staged: bool, skips: Mapping[int, int] = MappingProxyType({})
) -> TrainingJobSpec:
    """Return a job's spec; ``skips`` are the steps that a change passes over, by the step of its entry."""
    spec = make_spec(["a", "b", "c"], schedule=schedule, sequence_tokens=PACK_TOKENS, packs_per_step=PACKS[0])
    if skips:
        given = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
        for entry in given["data"]["schedule"]:
            entry["skipSteps"] = skips.get(entry["fromStep"], 0)
        spec = TrainingJobSpec.model_validate(given, context={"stored": True})
    if not staged:
        return spec
    stages: list[dict[str, Any]] = [
        {"name": "one", "steps": STAGED - 1},
        {
            "name": "two",
            "steps": 100 - STAGED + 1,
            "packsPerStep": PACKS[1],
            "weights": [{"source": "s2", "weight": 1}],
        },
    ]
    given = spec.model_dump(mode="json", by_alias=True, exclude_none=True)
    given["training"]["stages"] = stages
    return TrainingJobSpec.model_validate(given, context={"stored": True})


@st.composite
def runs(draw: st.DrawFn) -> Run:
    """Attempts that resume anywhere, also before a change that is in force; appended entries may weigh nothing."""
    staged = draw(st.booleans())
    steps = sorted(draw(st.sets(st.integers(2, STEPS).filter(lambda step: step != STAGED), max_size=6)))
    known = draw(st.integers(0, min(2, len(steps))))
    entries = [(step, draw(weights.filter(any) if at < known else weights)) for at, step in enumerate(steps)]
    skips = {step: draw(st.sampled_from([0, 0, 1, 5, 8])) for step in steps}
    specs = [spec_of(entries[:known], staged=staged, skips=skips)]
    records, resumed = [first_mixture(specs[0])], [0]
    while known < len(entries):
        known = draw(st.integers(known, len(entries)) if len(specs) < 3 else st.just(len(entries)))
        specs.append(spec_of(entries[:known], staged=staged, skips=skips))
        resumed.append(draw(st.integers(0, STEPS)))
        records.append(next_mixture(specs[-1], records[-1], after_step=resumed[-1]))
    return Run(specs=specs, records=records, resumed=resumed)


def plan_of(spec: TrainingJobSpec, record: MixtureRecord | None, *, version: int = EVEN) -> OrderPlan:
    return OrderPlan(
        seed=3,
        names=("s0", "s1", "s2"),
        lengths=LENGTHS,
        segments=segments_of(spec, record),
        packs_per_step=PACKS[0],
        pack_tokens=PACK_TOKENS,
        version=version,
    )


def opened(spec: TrainingJobSpec, record: MixtureRecord | None, *, version: int = EVEN) -> tuple[Order, Identity]:
    plan = plan_of(spec, record, version=version)
    return Order(plan), identity_of_order(plan, spec, ["a", "b", "c"], record, augmentation=[], pixel_version=1)


@QUICK
@given(runs())
def test_an_appended_change_alters_no_step_before_its_window(run: Run) -> None:
    for at in range(1, len(run.records)):
        before, after = run.records[at - 1 : at + 1]
        assert after.changes[: len(before.changes)] == before.changes
        added = after.changes[len(before.changes) :]
        border = min([STEPS + 1, *(change.step for change in added)])
        assert all(change.step > run.resumed[at] and change.step >= change.from_step for change in added)
        steps = [change.step for change in after.changes]
        assert steps == sorted(steps)
        segments = segments_of(run.specs[at], before)
        assert all(window_border(run.specs[at], segments, change.step) == change.step for change in added)
        (old, known), (new, identity) = opened(run.specs[at - 1], before), opened(run.specs[at], after)
        for step in range(1, border):
            assert new.packs(step) == old.packs(step)
            assert identity.at(step) == known.at(step)
        if border <= STEPS:
            assert identity.at(border) != known.at(border)


@QUICK
@given(runs(), st.integers(1, STEPS))
def test_a_checkpoint_before_a_change_continues_after_it_without_a_walk(run: Run, step: int) -> None:
    for at in range(1, len(run.records)):
        before, after = run.records[at - 1 : at + 1]
        border = min([STEPS + 1, *(change.step for change in after.changes[len(before.changes) :])])
        saved = min(step, border - 1)
        place = opened(run.specs[at - 1], before)[0].place(saved + 1)
        whole, resumed = (opened(run.specs[at], after)[0] for _ in range(2))
        assert resumed.jump(place)
        expected = whole.packs(saved + 1)
        # From where it begins: a walk from step 1 would pass over the first window again.
        resumed._known = [window for window in resumed._known if window.first_step == whole._find(saved + 1).first_step]
        assert resumed.packs(saved + 1) == expected


@QUICK
@given(runs(), st.integers(1, STEPS))
def test_an_order_that_is_amended_while_it_is_read_is_that_of_a_later_attempt(run: Run, walked: int) -> None:
    """However far it was read, and though ranks that train know the job as it was when their attempt began."""
    for at in range(1, len(run.records)):
        before, after = run.records[at - 1 : at + 1]
        border = min([STEPS + 1, *(change.step for change in after.changes[len(before.changes) :])])
        amended, later = opened(run.specs[at - 1], before)[0], opened(run.specs[at], after)[0]
        for step in range(1, walked + 1):
            amended.packs(step)
        amended.amend(plan_of(run.specs[at - 1], after), from_step=border)
        for step in [walked, *range(1, STEPS + 4)]:
            assert amended.packs(step) == later.packs(step)
            assert amended.place(step) == later.place(step)


@QUICK
@given(runs())
def test_what_a_checkpoint_says_of_the_mixture_restores_it(run: Run) -> None:
    for spec, record in zip(run.specs, run.records, strict=True):
        # The end of the run is not in a checkpoint: without a resume point it is the spec's.
        assert restored_mixture(spec, record.summary()) == record.model_copy(update={"training": None})


@pytest.mark.parametrize("steps", [4, 8, 6])
@pytest.mark.parametrize("appended", [False, True])
def test_data_of_so_many_steps_are_passed_over_and_what_follows_is_trained(steps: int, appended: bool) -> None:
    """Windows of 4 steps; a change at step 9, which is a window's first one."""
    entries = [(9, [2, 1, 0])]
    kept, skipped = spec_of(entries, staged=False), spec_of(entries, staged=False, skips={9: steps})
    record = next_mixture(skipped, first_mixture(spec_of([], staged=False)), after_step=3) if appended else None
    (whole, before), (passed, after) = opened(kept, None), opened(skipped, record)
    # What a run would train by the weights before.
    unchanged, known = opened(spec_of([], staged=False), first_mixture(spec_of([], staged=False)))

    def taken(order: Order, first: int, count: int) -> set[Slot]:
        return {slot for step in range(first, first + count) for pack in order.packs(step) for slot in pack}

    assert [passed.packs(step) for step in range(1, 9)] == [whole.packs(step) for step in range(1, 9)]
    assert (after.at(8) == known.at(8)) == appended
    assert after.at(9) not in {before.at(9), known.at(9)}
    assert not taken(passed, 1, 30) & taken(unchanged, 9, steps // 4 * 4)
    assert taken(passed, 9, 1), "it goes on"
    resumed = opened(skipped, record)[0]
    assert resumed.jump(whole.place(8)), "a state from before the change"
    assert resumed.packs(9) == passed.packs(9)
    assert opened(skipped, record)[0].jump(passed.place(14))


def test_a_checkpoint_just_before_a_change_continues_though_another_joins_it() -> None:
    """The state says where the window before the change ended: what the change passes over is not final yet."""
    one = [(9, [1, 0, 2])]
    first, base = spec_of(one, staged=False, skips={9: 5}), first_mixture(spec_of([], staged=False))
    before = next_mixture(first, base, after_step=3)
    second = spec_of([*one, (10, [0, 1, 1])], staged=False, skips={9: 5, 10: 3})
    after = next_mixture(second, before, after_step=8)
    after = after.model_copy(update={"changes": tuple(each.model_copy(update={"step": 9}) for each in after.changes)})
    saved, whole = opened(first, before)[0], opened(second, after)[0]
    resumed = opened(second, after)[0]
    assert resumed.jump(saved.place(9))
    assert resumed.packs(9) == whole.packs(9)
    assert saved.place(9) == whole.place(9)


def test_changes_that_wait_for_the_same_window_pass_over_the_steps_of_both() -> None:
    entries, skips = [(5, [1, 0, 2]), (6, [0, 1, 1])], {5: 3, 6: 4}
    record = next_mixture(
        spec_of(entries, staged=False, skips=skips), first_mixture(spec_of([], staged=False)), after_step=6
    )
    assert [(change.step, change.skip_steps) for change in record.changes] == [(9, 3), (9, 4)]
    [change] = mixture_changes(spec_of(entries, staged=False, skips=skips), record)
    assert (change.from_step, change.skip_steps) == (9, 7)
    base = spec_of([(9, [1, 0, 2])], staged=False, skips={9: 5})
    later = spec_of([(9, [1, 0, 2]), (10, [0, 1, 1])], staged=False, skips={9: 5, 10: 2})
    moved = next_mixture(later, first_mixture(base), after_step=2)
    joined = moved.model_copy(update={"changes": (moved.changes[0].model_copy(update={"step": 9}),)})
    assert mixture_changes(later, joined)[0].skip_steps == 7, (
        "with what an entry passes over that was known from the beginning"
    )


def test_a_schedule_that_is_known_from_the_beginning_keeps_its_order_and_its_identity() -> None:
    """The digest is the one of releases before schedules could be appended to: their checkpoints resume."""
    spec = spec_of([(5, [1, 0, 2]), (9, [0, 1, 1])], staged=False)
    (order, identity), (plain, before) = (
        opened(spec, mixture, version=WINDOWED) for mixture in (first_mixture(spec), None)
    )
    assert [order.packs(step) for step in range(1, 12)] == [plain.packs(step) for step in range(1, 12)]
    assert identity.links == before.links
    assert identity.at(1) == identity.at(99) == "09847c532b347326338ee65bdd068362208ebb1150777026cc9d87faf5b3088d"


def test_a_change_waits_for_its_window_and_a_stage_that_came_meanwhile_wins() -> None:
    base = spec_of([(5, [1, 0, 2])], staged=True)
    known = first_mixture(base)
    entries = [(5, [1, 0, 2]), (6, [0, 1, 0]), (7, [0, 0, 0]), (8, [1, 1, 0]), (20, [2, 1, 0])]
    spec = spec_of(entries, staged=True)
    early = next_mixture(spec, known, after_step=2)
    assert [(change.from_step, change.step) for change in early.changes] == [(6, 9), (8, 9), (20, 21)]
    assert [change.from_step for change in mixture_changes(spec, early)] == [5, 9, STAGED, 21]
    assert early.read == len(entries)
    late = next_mixture(spec, known, after_step=10)
    assert [(change.from_step, change.step) for change in late.changes] == [(20, 21)], "the stage weighs from 13 on"
    last = spec_of([*entries, (21, [0, 1, 0])], staged=True)
    back = next_mixture(last, next_mixture(spec, known, after_step=40), after_step=4)
    assert [change.step for change in back.changes] == [41, 41], "none takes effect before an earlier entry does"
    assert next_mixture(base, late, after_step=3) == late, "a reader with an older spec takes nothing back"


def test_an_appended_change_waits_for_a_window_where_its_steps_to_pass_over_fit_the_limit() -> None:
    base = spec_of([(5, [1, 0, 2])], staged=False, skips={5: 9_000})
    entries = [(5, [1, 0, 2]), (6, [0, 1, 0]), (7, [1, 1, 0]), (8, [1, 0, 0]), (9, [0, 0, 1]), (10, [0, 1, 1])]
    skips = {5: 9_000, 6: 4_000, 7: 6_000, 8: 1, 9: 0, 10: 10_000}
    spec = spec_of(entries, staged=False, skips=skips)
    record = next_mixture(spec, first_mixture(base), after_step=1)
    assert [(change.from_step, change.step) for change in record.changes] == [
        (6, 9),
        (7, 9),
        (8, 13),
        (9, 13),
        (10, 17),
    ]
    passed = {change.from_step: change.skip_steps for change in mixture_changes(spec, record)}
    assert passed == {5: 9_000, 9: 10_000, 13: 1, 17: 10_000}


def test_an_appended_change_that_weighs_a_source_without_a_sample_is_left_out() -> None:
    """What runs must not fail by it, and nothing can take it away again."""
    base = make_spec(["a", "b", "c"], weights=[1, 1, 0], packs_per_step=PACKS[0])
    entries = [(2, [1, 0, 1]), (6, [0, 1, 0]), (10, [0, 0, 1])]
    spec = make_spec(["a", "b", "c"], weights=[1, 1, 0], schedule=entries, packs_per_step=PACKS[0])
    record = next_mixture(spec, first_mixture(base), after_step=0)
    plan = OrderPlan(
        seed=3,
        names=("s0", "s1", "s2"),
        lengths=(*LENGTHS[:2], np.array([], np.int64)),
        segments=segments_of(spec, record),
        packs_per_step=PACKS[0],
        pack_tokens=64,
    )
    used, kept = _without_vain_changes(plan, spec, record)
    assert [change.from_step for change in kept.changes] == [6]
    assert [segment.weights for segment in used.segments] == [(1, 1, 0), (0, 1, 0)]
    assert Order(used).packs(10)


def test_an_appended_change_that_would_use_up_the_data_is_left_out_and_stays_so() -> None:
    """The steps after it were trained without it: a later change, with which they would last, does not bring it
    back."""
    specs = []
    for entries in ([], [(5, [0, 1, 0])], [(5, [0, 1, 0]), (13, [1, 0, 0])]):
        given = spec_of(entries, staged=False).model_dump(mode="json", by_alias=True, exclude_none=True)
        given["data"]["sources"][1]["epochsMax"] = 60
        specs.append(TrainingJobSpec.model_validate(given, context={"stored": True}))
    record = first_mixture(specs[0])
    for spec, steps, weights in ((specs[1], [], [(1, 1, 1)]), (specs[2], [13], [(1, 1, 1), (1, 0, 0)])):
        record = next_mixture(spec, record, after_step=0)
        plan = dataclasses.replace(plan_of(spec, record), epochs_max=(None, 60, None), last_step=100)
        used, kept = _without_vain_changes(plan, spec, record)
        assert [change.step for change in kept.changes] == steps
        assert [segment.weights for segment in used.segments] == weights
        assert Order(used).packs(100)


@pytest.mark.parametrize(("spike", "first", "skipped"), [(11, 5, 8), (17, 9, 12), (18, 9, 12)])
def test_a_rollback_skips_the_data_of_the_suspected_steps_and_no_other(spike: int, first: int, skipped: int) -> None:
    """Windows of 4 steps; the eight steps up to the spike are suspected."""
    spec = spec_of([], staged=False)
    known = first_mixture(spec)
    rejection = rejection_of(spec, known, attempt=1, step=spike, why="a spike")
    assert rejection is not None
    assert (rejection.from_step, rejection.skip_steps) == (first, skipped)
    answered = with_rejection(spec, known, rejection)
    assert with_rejection(spec, answered, rejection) == answered
    (before, _), (after, _) = opened(spec, known), opened(spec, answered)

    def taken(order: Order, steps: range) -> set[Slot]:
        return {slot for step in steps for pack in order.packs(step) for slot in pack}

    assert [after.packs(step) for step in range(1, first)] == [before.packs(step) for step in range(1, first)]
    end = first + skipped
    assert not taken(after, range(1, 24)) & taken(before, range(first, end))
    assert taken(before, range(end, end + 4)) <= taken(after, range(first, first + 8)), "what follows is not skipped"
    # The same as a run that was given the entry; and a second spike in that window skips that window too.
    entry = [(first, [source.weight for source in spec.data.sources])]
    given_it = opened(spec_of(entry, staged=False, skips={first: skipped}), None)[0]
    assert [after.packs(step) for step in range(1, 20)] == [given_it.packs(step) for step in range(1, 20)]
    again = rejection_of(spec, answered, attempt=2, step=first + 1, why="another")
    assert again is not None
    assert (again.from_step, again.skip_steps) == (first, 5), "a step more: an entry restarts the turns of sources"
    twice = opened(spec, with_rejection(spec, answered, again))[0]
    assert not taken(twice, range(1, 24)) & taken(after, range(first, first + 4))
