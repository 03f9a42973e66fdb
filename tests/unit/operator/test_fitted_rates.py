"""Rates that the wind tunnel reads from a job's status."""

from __future__ import annotations

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.accounting import Accounting, TimeCell, Use
from polyreme_api.job.status import AttemptStatus, RestartRecord
from polyreme_operator.types.reasons import Cause, Scope
from polyreme_wind_tunnel.causes import HOUR_MS, Reach
from polyreme_wind_tunnel.rates import fitted
from polyreme_wind_tunnel.scenario import ANY_JOB

WORLD = 8
HELD_MS = 100 * HOUR_MS


def status(*causes: Cause, restarts: int | None = None, step: int = 3000) -> TrainingJobStatus:
    """A job of eight devices that held them for a hundred hours: 90 productive, 8 starting, 2 in saves."""
    cells = {
        Use.PRODUCTIVE: 90,
        Use.STARTING: 6,
        Use.WAITING_FOR_PODS: 2,
        Use.CHECKPOINT: 2,
        Use.QUEUED: 500,
    }
    return TrainingJobStatus(
        attempt=AttemptStatus(number=4, plan_hash="", replicas=2, devices=4),
        step=step,
        restarts=len(causes) if restarts is None else restarts,
        restart_records=[
            RestartRecord(attempt=at + 1, at="2026-11-01T00:00:00Z", cause=cause.value, scope=Scope.POD.value)
            for at, cause in enumerate(causes)
        ],
        accounting=Accounting(
            cells=[
                TimeCell(what=use.value, device_milliseconds=hours * HOUR_MS * WORLD) for use, hours in cells.items()
            ]
        ),
    )


def test_rates_and_times_are_those_of_the_status() -> None:
    found = fitted(ANY_JOB, status(Cause.NODE_LOST, Cause.NODE_LOST, Cause.RANK_KILLED, Cause.HUNG))
    assert (found.nodes, found.devices, found.faults) == (2, 4, 4)
    assert found.device_hours == 800, "the queue holds no devices"
    assert found.device_mttf_hours == 200
    low, high = found.mttf_range_hours
    # Exact limits of the mean where four were counted: 1.09 and 10.24.
    assert 800 / high == pytest.approx(1.09, rel=0.02)
    assert 800 / low == pytest.approx(10.24, rel=0.02)
    assert {(cause.name, cause.weight, cause.reach, cause.silent) for cause in found.causes} == {
        ("NodeLost", 2, Reach.NODE, False),
        ("RankKilled", 1, Reach.NONE, False),
        ("Hung", 1, Reach.NONE, True),
    }
    assert found.restart_ms == 2 * HOUR_MS, "eight hours of starts, four attempts"
    assert found.interval_ms == 90 * HOUR_MS * ANY_JOB.checkpoint.every_steps // 3000
    assert found.stall_ms == 2 * HOUR_MS // (3000 // ANY_JOB.checkpoint.every_steps)
    assert found.effective_share == pytest.approx(0.9)


def test_what_is_no_fault_counts_as_none() -> None:
    moved = [Cause.PREEMPTED, Cause.EVICTED, Cause.HOST_RESTARTED]
    assert fitted(ANY_JOB, status(*moved, Cause.RANK_EXITED)).faults == 1
    # Of a hundred restarts four are on record, and one of these was a fault.
    assert fitted(ANY_JOB, status(*moved, Cause.RANK_EXITED, restarts=100)).faults == 25


def test_sums_of_an_older_operator_are_taken_with_the_devices_in_use() -> None:
    old = status(Cause.RANK_EXITED).model_copy(update={"accounting": Accounting(effective_milliseconds=HELD_MS)})
    assert fitted(ANY_JOB, old).device_hours == 800


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (TrainingJobStatus(), "has not trained"),
        (status(Cause.RANK_EXITED, step=0), "has not trained"),
        (status(), "met no fault"),
        (status(Cause.PREEMPTED), "met no fault"),
    ],
)
def test_a_status_that_says_nothing_is_refused(given: TrainingJobStatus, says: str) -> None:
    with pytest.raises(InvalidConfigError, match=says):
        fitted(ANY_JOB, given)
