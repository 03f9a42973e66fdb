"""What the machine did to a job costs it nothing once that is repaired: a restarted host, a store that was away."""

from typing import Any

import pytest

from polyreme_api.fields import Condition
from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import RestartRecord
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile.failure_policy import GiveUp, Restart, judge, restarts_without_progress
from polyreme_operator.reconcile.status_builder import reopen
from polyreme_operator.types.views import PodPhase
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, pod, snapshot


def restarts(count: int, cause: str) -> list[RestartRecord]:
    return [
        RestartRecord(attempt=number + 1, at=rfc3339(NOW_S - 50), cause=cause, scope="RestartPod")
        for number in range(count)
    ]


def verdict(*, reason: str, count: int) -> Any:
    owner = admitted(job(), restart_records=restarts(count, "RankExited"))
    ended: dict[str, Any] = {"phase": PodPhase.FAILED, "reason": reason}
    seen = snapshot(
        owner, lease=lease(owner, phase="Training", step=0), pods=(pod(owner, 0, **ended), pod(owner, 1, **ended))
    )
    assert seen.job.spec is not None
    return judge(seen, seen.job.spec, NOW_S)


def test_a_restarted_host_uses_no_restart_budget_and_no_backoff() -> None:
    assert isinstance(verdict(reason="Error", count=3), GiveUp)
    said = verdict(reason="HostRestarted", count=3)
    assert isinstance(said, Restart)
    assert (said.failure.cause, said.record.counts, said.due_s) == ("HostRestarted", False, NOW_S)


def test_restarts_of_the_host_are_no_streak_and_end_none() -> None:
    assert restarts_without_progress(restarts(9, "HostRestarted")) == 0
    assert restarts_without_progress([*restarts(2, "RankExited"), *restarts(3, "HostRestarted")]) == 2


def failed(reason: str) -> TrainingJobStatus:
    condition = Condition(type="Failed", status="True", reason=reason)
    return TrainingJobStatus(
        conditions=[Condition(type="Admitted", status="False", reason="Finished"), condition],
        restart_records=restarts(4, "EnvironmentFailed"),
        completed_at=rfc3339(NOW_S),
    )


@pytest.mark.parametrize("reason", ["EnvironmentFailed", "DataDamaged"])
def test_a_job_that_its_environment_or_data_failed_goes_on_with_all_its_budgets(reason: str) -> None:
    opened = reopen(failed(reason))
    assert not opened.finished
    assert (opened.completed_at, opened.restart_records) == (None, [])
    assert [condition.type for condition in opened.conditions] == ["Admitted"]


@pytest.mark.parametrize("reason", ["Misconfigured", "MaxRestartsExceeded", "NoProgress", "FailurePolicy"])
def test_any_other_end_is_final(reason: str) -> None:
    status = failed(reason)
    assert reopen(status) is status
