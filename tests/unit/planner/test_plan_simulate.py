"""Simulated schedules, against sums made by hand and a slow simulator that is independent of the fast one's order."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError, PolyremeError
from polyreme_planner.pipeline_simulation import Program, StageTimes, held_at_most, program
from polyreme_planner.schedules import (
    Kind,
    Schedule,
    Table,
    Work,
    pieces,
    ranks_of_stages,
    schedule_misfits,
    stages_per_rank,
    table,
)

EVEN = StageTimes(forward_s=1, input_s=1, weight_s=1)
F, B, I, W = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT


@pytest.mark.parametrize(
    ("schedule", "makespan_s"),
    [(Schedule.INTERLEAVED, 105.0), (Schedule.ZBV, 99.0), (Schedule.DUAL_PIPE_V, 102.0)],
)
def test_even_stages_take_what_the_tables_of_torch_take(schedule: Schedule, makespan_s: float) -> None:
    """Four ranks, eight stages, 16 microbatches: 96 units of work on each rank."""
    simulated = program(schedule, ranks=4, microbatches=16).simulate([EVEN] * 8)
    assert simulated.makespan_s == makespan_s
    assert simulated.busy_s == (96.0,) * 4
    assert simulated.bubble == pytest.approx(1 - 96 / makespan_s)


@pytest.mark.slow
@given(ranks=st.integers(2, 8), microbatches=st.integers(8, 24))
def test_one_forward_one_backward_takes_the_textbooks_time(ranks: int, microbatches: int) -> None:
    """(m + p - 1) forwards and backwards: arXiv:2104.04473, section 2.2.1."""
    simulated = program(Schedule.ONE_F_ONE_B, ranks=ranks, microbatches=microbatches)
    assert simulated.makespan_s([EVEN] * ranks) == 3 * (microbatches + ranks - 1)


@pytest.mark.slow
@given(schedule=st.sampled_from(Schedule), ranks=st.integers(2, 5), microbatches=st.integers(1, 24))
def test_every_table_does_all_work_once_and_in_order(schedule: Schedule, ranks: int, microbatches: int) -> None:
    if schedule_misfits(schedule, ranks=ranks, microbatches=microbatches):
        with pytest.raises(InvalidConfigError, match="schedule does not fit"):
            table(schedule, ranks=ranks, microbatches=microbatches)
        return
    where = ranks_of_stages(schedule, ranks)
    assert sorted(where) == sorted(list(range(ranks)) * stages_per_rank(schedule))
    for rank, slots in enumerate(table(schedule, ranks=ranks, microbatches=microbatches)):
        done: list[Work] = list(pieces(slots))
        assert {work.stage for work in done} == {stage for stage, at in enumerate(where) if at == rank}
        for stage in {work.stage for work in done}:
            for microbatch in range(microbatches):
                kinds = [w.kind for w in done if (w.stage, w.microbatch) == (stage, microbatch)]
                assert kinds in ([F, B], [F, I, W])


@st.composite
def tables_and_times(draw: st.DrawFn) -> tuple[Schedule, int, int, list[StageTimes], float]:
    schedule = draw(st.sampled_from(Schedule))
    ranks = draw(st.integers(2, 4))
    microbatches = ranks * draw(st.integers(2, 4))
    part = st.integers(0, 9).map(float)
    times = draw(
        st.lists(
            st.builds(StageTimes, forward_s=part, input_s=part, weight_s=part),
            min_size=ranks * stages_per_rank(schedule),
            max_size=ranks * stages_per_rank(schedule),
        )
    )
    return schedule, ranks, microbatches, times, draw(st.sampled_from([0.0, 0.5, 3.0]))


def slow_makespan_s(rows: Table, times: list[StageTimes], transfer_s: float) -> float:
    """Push every end later until nothing moves."""
    where = {work.stage: rank for rank, slots in enumerate(rows) for work in pieces(slots)}
    end_s = {slot: 0.0 for slots in rows for slot in slots}
    slot_of = {work: slot for slots in rows for slot in slots for work in slot}
    moved = True
    while moved:
        moved = False
        for rank, slots in enumerate(rows):
            free_s = 0.0
            for slot in slots:
                begin_s = free_s
                for work in slot:
                    neighbours = {F: (F,), B: (B, I), I: (B, I), W: ()}[work.kind]
                    source = work.stage - 1 if work.kind is F else work.stage + 1
                    for kind in neighbours:
                        source_slot = slot_of.get(Work(kind, source, work.microbatch))
                        if source_slot is not None:
                            late_s = 0.0 if where[source] == rank else transfer_s
                            begin_s = max(begin_s, end_s[source_slot] + late_s)
                done_s = begin_s + sum(times[work.stage].of(work.kind) for work in slot)
                moved |= done_s != end_s[slot]
                end_s[slot] = free_s = done_s
    return max(end_s.values())


@pytest.mark.slow
@given(tables_and_times())
def test_the_fast_simulator_agrees_with_the_slow_one(drawn: tuple[Schedule, int, int, list[StageTimes], float]) -> None:
    schedule, ranks, microbatches, times, transfer_s = drawn
    simulated = program(schedule, ranks=ranks, microbatches=microbatches)
    expected_s = slow_makespan_s(table(schedule, ranks=ranks, microbatches=microbatches), times, transfer_s)
    assert simulated.makespan_s(times, transfer_s=transfer_s) == pytest.approx(expected_s)
    drawn_s = simulated.simulate(times, transfer_s=transfer_s)
    assert drawn_s.makespan_s == pytest.approx(expected_s)
    for rank, spans in enumerate(drawn_s.spans):
        assert drawn_s.busy_s[rank] <= expected_s + 1e-9
        for before, after in itertools.pairwise(spans):
            assert before.end_s <= after.begin_s + 1e-9


def test_a_schedule_that_deadlocks_is_refused() -> None:
    crossed: Table = (((Work(F, 0, 0),), (Work(B, 0, 0),), (Work(F, 2, 0),)), ((Work(F, 1, 0),), (Work(B, 1, 0),)))
    with pytest.raises(PolyremeError, match="schedule deadlocks: next are 0B0, 1B0"):
        Program.of(crossed)


@pytest.mark.parametrize("schedule", list(Schedule))
@given(weights=st.lists(st.integers(0, 9), min_size=2, max_size=2))
@settings(max_examples=5)
def test_a_rank_holds_what_it_has_begun_and_not_ended(schedule: Schedule, weights: list[int]) -> None:
    """Against a walk through the table, with any weight of the two stages of a rank."""
    for slots, moments in zip(
        table(schedule, ranks=4, microbatches=16), held_at_most(schedule, ranks=4, microbatches=16), strict=True
    ):
        stages = sorted({work.stage for slot in slots for work in slot})
        held = most = 0
        for work in (work for slot in slots for work in slot):
            weight = weights[stages.index(work.stage)]
            held += weight if work.kind is F else -weight if work.kind is not I else 0
            most = max(most, held)
        assert most == max(
            sum(count * weight for count, weight in zip(counts, weights, strict=False)) for counts in moments
        )


@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_the_first_rank_of_one_forward_one_backward_holds_one_microbatch_a_stage(ranks: int) -> None:
    held = held_at_most(Schedule.ONE_F_ONE_B, ranks=ranks, microbatches=4 * ranks)
    assert held == tuple(((count,),) for count in range(ranks, 0, -1))
