"""Splits of layers over stages, against exhaustive search, and against sums made by hand."""

from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.pipeline_simulation import StageTimes, program
from polyreme_planner.schedules import Schedule, ranks_of_stages, schedule_misfits
from polyreme_planner.stage_split import ModelTimes, Split, balanced_split, best_split, equal_split, least_layers

MICROBATCHES = 8


def work(units: float) -> StageTimes:
    return StageTimes(forward_s=units, input_s=units, weight_s=units)


def model(first: float, layers: list[float], last: float) -> ModelTimes:
    return ModelTimes(first=work(first), layers=tuple(map(work, layers)), last=work(last))


def every_split(layers: int, stages: int) -> list[Split]:
    least = least_layers(stages)
    counts = itertools.product(range(layers + 1), repeat=stages)
    return [
        split
        for split in counts
        if sum(split) == layers and all(count >= low for count, low in zip(split, least, strict=True))
    ]


parts = st.integers(0, 12).map(float)
models = st.builds(
    model, first=parts, layers=st.lists(st.integers(1, 6).map(float), min_size=2, max_size=7), last=parts
)


@pytest.mark.slow
@given(times=models, schedule=st.sampled_from(Schedule), transfer_s=st.sampled_from([0.0, 0.5]))
@settings(max_examples=60)
def test_no_split_of_a_small_model_is_better(times: ModelTimes, schedule: Schedule, transfer_s: float) -> None:
    simulate = program(schedule, ranks=2, microbatches=MICROBATCHES).makespan_s
    stages = len(ranks_of_stages(schedule, 2))
    split, took_s = best_split(times, schedule=schedule, ranks=2, microbatches=MICROBATCHES, transfer_s=transfer_s)
    least_s = min(
        simulate(times.of_stages(other), transfer_s=transfer_s) for other in every_split(len(times.layers), stages)
    )
    assert took_s == simulate(times.of_stages(split), transfer_s=transfer_s) == pytest.approx(least_s)


@given(
    first=parts,
    layers=st.integers(6, 14),
    last=parts,
    schedule=st.sampled_from(Schedule),
    ranks=st.integers(2, 3),
)
@settings(max_examples=60)
def test_no_rank_need_have_less_at_most(first: float, layers: int, last: float, schedule: Schedule, ranks: int) -> None:
    """Layers of one cost: the balanced split's fullest rank has as little as that of any split by ranks."""
    rank_of = ranks_of_stages(schedule, ranks)
    split = balanced_split(model(first, [2.0] * layers, last), schedule=schedule, ranks=ranks)
    assert sum(split) == layers
    base = [0.0] * ranks
    least = [0] * ranks
    for stage, low in enumerate(least_layers(len(rank_of))):
        least[rank_of[stage]] += low
    base[rank_of[0]] += first
    base[rank_of[-1]] += last
    given_layers = [sum(split[stage] for stage in range(len(split)) if rank_of[stage] == rank) for rank in range(ranks)]
    fullest = max(base[rank] + 2.0 * given_layers[rank] for rank in range(ranks))
    others = (
        max(base[rank] + 2.0 * counts[rank] for rank in range(ranks))
        for counts in itertools.product(range(layers + 1), repeat=ranks)
        if sum(counts) == layers and all(count >= low for count, low in zip(counts, least, strict=True))
    )
    assert fullest == min(others)


@given(times=models, schedule=st.sampled_from(Schedule), ranks=st.integers(2, 3))
@settings(max_examples=60)
def test_a_split_that_is_not_allowed_is_never_taken(times: ModelTimes, schedule: Schedule, ranks: int) -> None:
    if schedule_misfits(schedule, ranks=ranks, microbatches=2 * ranks):
        return
    stages = len(ranks_of_stages(schedule, ranks))
    if len(times.layers) < stages:
        return
    split, took_s = best_split(
        times,
        schedule=schedule,
        ranks=ranks,
        microbatches=2 * ranks,
        allowed=lambda split: split[0] == 0,
        simulations=60,
    )
    assert split[0] == 0 or took_s == math.inf


@pytest.mark.slow
@pytest.mark.parametrize("schedule", [Schedule.INTERLEAVED, Schedule.ZBV, Schedule.DUAL_PIPE_V])
def test_the_climb_over_a_large_model_ends_lower_than_it_began(schedule: Schedule) -> None:
    times = model(10.3, [1.0] * 27, 3.6)
    simulate = program(schedule, ranks=4, microbatches=16).makespan_s
    split, took_s = best_split(times, schedule=schedule, ranks=4, microbatches=16, simulations=600)
    assert took_s == simulate(times.of_stages(split))
    assert took_s <= simulate(times.of_stages(balanced_split(times, schedule=schedule, ranks=4)))
    assert took_s < 0.8 * simulate(times.of_stages(equal_split(27, 8)))
    assert split[0] == 0, "the tower alone is more than a rank's share"


def test_the_simulations_of_a_split_are_bounded() -> None:
    simulations = []

    def counted(split: Split) -> bool:
        simulations.append(split)
        return True

    best_split(model(3, [1.0] * 27, 2), schedule=Schedule.ZBV, ranks=4, microbatches=8, simulations=50, allowed=counted)
    assert len(simulations) <= 52


def test_more_stages_than_layers_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match=r"8 for 5 layers.*spec\.parallelism\.pp"):
        best_split(model(1, [1.0] * 5, 1), schedule=Schedule.ZBV, ranks=4, microbatches=8)
