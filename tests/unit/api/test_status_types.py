"""The status: what it holds, how large it gets, how it is read."""

from __future__ import annotations

import itertools
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme_api.fields import Condition
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import (
    COUNTED_RESTARTS_MAX,
    RESTART_RECORDS_MAX,
    AttemptStatus,
    EarlierRestarts,
    RestartRecord,
    TrainingJobStatus,
    replacement_runs,
    replacements_by_index,
)

ATTEMPT = AttemptStatus(
    number=2,
    plan_hash="0123",
    replicas=4,
    devices=2,
    replacements=replacement_runs({3: 2}),
    placement=Placement.of(["a", "a", "b", "a"]),
)


@pytest.mark.parametrize(
    "numbers",
    [
        dict.fromkeys(range(15_000), 7),
        {index: 1 + (index % 97 == 0) for index in range(15_000)},
        {index: index % 2 for index in range(15_000)},
    ],
    ids=["the whole gang anew", "a worker in a hundred once more", "every other worker"],
)
def test_a_status_of_a_gang_of_15000_with_a_long_past_stays_under_200_kib(numbers: dict[int, int]) -> None:
    nodes = [f"gpu-node-{pool:02d}-{node:04d}" for pool in range(15) for node in range(125) for _ in range(8)]
    record = RestartRecord(
        attempt=1, at="2026-11-21T08:00:00Z", cause="RankExited", scope="RestartPod", message="m" * 200
    )
    status = TrainingJobStatus(
        attempt=ATTEMPT.model_copy(
            update={"placement": Placement.of(nodes), "replacements": replacement_runs(numbers), "replicas": 15_000}
        ),
        restart_records=[record] * RESTART_RECORDS_MAX,
        earlier_restarts=EarlierRestarts(counted_at=[1_700_000_000] * COUNTED_RESTARTS_MAX),
    )
    assert len(status.model_dump_json(by_alias=True)) < 200 * 1024


@given(st.dictionaries(st.integers(0, 300), st.integers(0, 5), max_size=300))
def test_replacement_numbers_go_round_through_their_code(numbers: dict[int, int]) -> None:
    runs = replacement_runs(numbers)
    assert replacements_by_index(runs) == {index: number for index, number in numbers.items() if number}
    attempt = ATTEMPT.model_copy(update={"replacements": runs})
    assert [attempt.replacement(index) for index in range(302)] == [numbers.get(index, 0) for index in range(302)]
    assert all(one[0] != other[0] for one, other in itertools.pairwise(runs))


def test_places_that_were_never_refilled_have_replacement_0() -> None:
    assert [ATTEMPT.replacement(index) for index in range(4)] == [0, 0, 0, 2]


def test_a_status_goes_round_through_json() -> None:
    status = TrainingJobStatus(attempt=ATTEMPT, conditions=[Condition(type="Ready", status="False", reason="Starting")])
    assert TrainingJobStatus.model_validate_json(status.model_dump_json(by_alias=True)) == status


def test_a_status_of_a_newer_version_is_read() -> None:
    assert TrainingJobStatus.model_validate({"step": 3, "mood": "good"}).step == 3


@pytest.mark.parametrize(
    ("conditions", "finished"),
    [
        ([], False),
        ([Condition(type="Succeeded", status="True", reason="Done")], True),
        ([Condition(type="Failed", status="True", reason="Crash")], True),
        ([Condition(type="Failed", status="False", reason="Fine")], False),
        ([Condition(type="Failed", status="Unknown", reason="Fine")], False),
        ([Condition(type="Ready", status="True", reason="Training")], False),
    ],
)
def test_only_a_terminal_condition_that_holds_finishes_a_job(conditions: list[Condition], finished: bool) -> None:
    assert TrainingJobStatus(conditions=conditions).finished is finished


def test_a_condition_has_a_reason() -> None:
    with pytest.raises(ValueError, match="at least 1 character"):
        Condition(type="Ready", status="True", reason="")


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        ({}, ""),
        ({"Queued": ("True", "WaitingForTopology")}, "WaitingForTopology"),
        ({"Queued": ("False", "Admitted"), "Running": ("False", "Starting")}, "Starting"),
        ({"Running": ("True", "Training")}, "Training"),
        ({"Preempted": ("True", "Preempting"), "Running": ("True", "Training")}, "Preempting"),
        ({"Preempted": ("True", "Preempted"), "Queued": ("True", "WaitingForCapacity")}, "WaitingForCapacity"),
        ({"Suspended": ("True", "Suspended"), "Running": ("False", "Suspended")}, "Suspended"),
        ({"Succeeded": ("True", "Completed"), "Running": ("False", "Finished")}, "Completed"),
        ({"Failed": ("True", "NoProgress"), "Queued": ("False", "Finished")}, "NoProgress"),
    ],
)
def test_one_reason_says_most(conditions: dict[str, tuple[Literal["True", "False"], str]], reason: str) -> None:
    said = [Condition(type=kind, status=truth, reason=why) for kind, (truth, why) in conditions.items()]
    status = TrainingJobStatus(conditions=said)
    assert status.reason == reason
    assert status.model_dump(by_alias=True)["reason"] == reason


def test_ready_pods_are_shown_with_the_attempts_size() -> None:
    assert TrainingJobStatus().ready == "0"
    assert TrainingJobStatus(attempt=ATTEMPT, ready_replicas=3).model_dump(by_alias=True)["ready"] == "3/4"
    assert TrainingJobStatus.model_validate({"ready": "9/9", "reason": "Old"}).ready == "0"
