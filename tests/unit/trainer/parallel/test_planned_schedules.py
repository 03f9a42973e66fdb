"""The planner's tables of pipeline schedules are those that torch runs, slot by slot."""

from __future__ import annotations

from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torch_schedules

from polyreme_planner.schedules import (
    Kind,
    Schedule,
    Slot,
    Work,
    ranks_of_stages,
    schedule_misfits,
    stages_per_rank,
    table,
)

MULTI = {
    Schedule.INTERLEAVED: torch_schedules.ScheduleInterleaved1F1B,
    Schedule.ZBV: torch_schedules.ScheduleZBVZeroBubble,
    Schedule.DUAL_PIPE_V: torch_schedules.ScheduleDualPipeV,
}


def torch_table(schedule: Schedule, ranks: int, microbatches: int, chunks: int = 2) -> list[list[Any]]:
    """Ask torch for its order without stages, groups or a run: only what its arithmetic reads is there."""
    if schedule is Schedule.ONE_F_ONE_B:
        single: Any = object.__new__(torch_schedules.Schedule1F1B)
        single._num_stages, single._n_microbatches = ranks, microbatches
        order = single._get_pipeline_order()
        # torch 2.13 draws the last rank's forwards from microbatch 1 on, and runs them from 0 on.
        forward = torch_schedules._ComputationType.FORWARD
        last = [
            action._replace(microbatch_index=action.microbatch_index - 1)
            if action is not None and action.computation_type is forward
            else action
            for action in order[ranks - 1]
        ]
        return [*(order[rank] for rank in range(ranks - 1)), last]
    bare: Any = object.__new__(MULTI[schedule])
    bare.pp_group_size, bare._n_microbatches, bare.n_local_stages = ranks, microbatches, chunks
    bare.num_stages = bare._num_stages = chunks * ranks
    bare.microbatches_per_round = microbatches // max(1, microbatches // ranks)
    return [bare._calculate_single_rank_operations(rank) for rank in range(ranks)]


def is_work(action: Any) -> bool:
    return bool(action.sub_actions) or action.computation_type.value in set(Kind)


def slot_of(action: Any) -> Slot:
    parts = action.sub_actions or (action,)
    return tuple(Work(Kind(part.computation_type.value), part.stage_index, part.microbatch_index) for part in parts)


@pytest.mark.slow
@pytest.mark.parametrize("schedule", list(Schedule))
@pytest.mark.parametrize("ranks", [2, 3, 4, 8])
def test_the_tables_are_torchs(schedule: Schedule, ranks: int) -> None:
    compared = 0
    for microbatches in range(ranks, 5 * ranks + 1):
        if schedule_misfits(schedule, ranks=ranks, microbatches=microbatches):
            continue
        theirs = torch_table(schedule, ranks, microbatches)
        for ours, row in zip(table(schedule, ranks=ranks, microbatches=microbatches), theirs, strict=True):
            assert list(ours) == [slot_of(action) for action in row if action is not None and is_work(action)]
            compared += 1
    assert compared >= 5 * ranks


@pytest.mark.slow
@pytest.mark.parametrize("chunks", [3, 4, 7])
def test_interleaved_tables_of_more_than_two_stages_a_rank_are_torchs(chunks: int) -> None:
    for ranks, microbatches in ((2, 4), (2, 6), (4, 8), (4, 16)):
        theirs = torch_table(Schedule.INTERLEAVED, ranks, microbatches, chunks)
        found = table(Schedule.INTERLEAVED, ranks=ranks, microbatches=microbatches, chunks=chunks)
        for ours, row in zip(found, theirs, strict=True):
            assert list(ours) == [slot_of(action) for action in row if action is not None and is_work(action)]
        assert ranks_of_stages(Schedule.INTERLEAVED, ranks, chunks) == tuple(range(ranks)) * chunks


@pytest.mark.parametrize(("schedule", "style"), [(Schedule.INTERLEAVED, "loop"), (Schedule.ZBV, "v")])
def test_stages_lie_on_the_ranks_that_torch_gives_them(schedule: Schedule, style: str) -> None:
    theirs = torch_schedules.generate_stage_to_rank_mapping(4, 4 * stages_per_rank(schedule), style=style)
    assert ranks_of_stages(schedule, 4) == tuple(theirs[stage] for stage in range(8))
