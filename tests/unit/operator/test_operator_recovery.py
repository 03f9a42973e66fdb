"""The recovery ladder as tables: what is seen, what follows."""

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import RESTART_RECORDS_MAX, LastCheckpoint, RestartRecord
from polyreme_api.times import rfc3339
from polyreme_operator.reconcile.failure_policy import (
    GiveUp,
    Healthy,
    Restart,
    judge,
    restarts_without_progress,
    with_restart,
)
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.transition import begin_attempt, restart
from polyreme_operator.types.reasons import Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView, PodPhase
from tests.unit.operator.operator_scenes import NOW_S, admitted, decide, job, lease, node, pod, snapshot


def running(owner: JobView, **fields: Any) -> JobSnapshot:
    fields.setdefault("lease", lease(owner, phase="Training", step=10, stepSeconds=1.0))
    fields.setdefault("pods", (pod(owner, 0), pod(owner, 1)))
    return snapshot(owner, **fields)


def restarted(count: int, **fields: Any) -> list[RestartRecord]:
    given = {"cause": "RankKilled", "scope": "RestartProcess", "index": 1, **fields}
    return [RestartRecord(attempt=n + 1, at=rfc3339(NOW_S - 50), **given) for n in range(count)]


def verdict(seen: JobSnapshot, now_s: float = NOW_S) -> Any:
    assert seen.job.spec is not None
    return judge(seen, seen.job.spec, now_s)


def test_a_running_attempt_is_left_alone() -> None:
    assert verdict(running(admitted(job()))) == Healthy()


@pytest.mark.parametrize(
    ("ended", "cause", "scope", "index"),
    [
        ({"rank": 1, "signal": 9}, "RankKilled", "RestartProcess", 1),
        ({"rank": 0, "code": 1}, "RankExited", "RestartProcess", 0),
        ({"rank": 1, "code": 17}, "RankExited", "RestartProcess", 1),
    ],
)
def test_a_dead_rank_restarts_in_place_and_at_once(ended: dict[str, int], cause: str, scope: str, index: int) -> None:
    owner = admitted(job())
    said = verdict(running(owner, lease=lease(owner, phase="Training", step=10, exits=[ended])))
    assert isinstance(said, Restart)
    assert (said.failure.cause, said.scope, said.failure.index) == (cause, scope, index)
    assert said.due_s == NOW_S
    assert said.replace == frozenset()


def test_exit_code_2_fails_the_job_as_misconfigured() -> None:
    owner = admitted(job())
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 0, "code": 2}])))
    assert isinstance(said, GiveUp)
    assert said.reason == "Misconfigured"


def test_exit_code_100_fails_the_job_at_once_with_the_ranks_own_words() -> None:
    owner = admitted(job())
    ended = lease(owner, phase="Training", step=10, exits=[{"rank": 1, "code": 100}], message="loss is nan at step 11")
    said = verdict(running(owner, lease=ended))
    assert isinstance(said, GiveUp)
    assert said.reason == "RunFailed"
    assert "loss is nan at step 11" in said.message


def test_a_step_that_fails_is_retried_once_from_each_checkpoint() -> None:
    owner = admitted(job())

    def ends(owner: JobView, *, checkpoint: int) -> Any:
        saved: Any = {"checkpoint": {"attempt": 1, "step": checkpoint}}
        words = "loss or gradient is not finite"
        exits = [{"rank": 1, "code": 101}]
        return verdict(
            running(owner, lease=lease(owner, phase="Training", step=10, exits=exits, message=words, **saved))
        )

    first = ends(owner, checkpoint=8)
    assert isinstance(first, Restart)
    assert (first.failure.cause, first.scope, first.due_s, first.record.counts) == (
        "StepFailed",
        "RestartProcess",
        NOW_S,
        True,
    )
    again = dataclasses.replace(owner, status=with_restart(owner.status, first.record))
    second = ends(again, checkpoint=8)
    assert isinstance(second, GiveUp)
    assert second.reason == "RunFailed"
    assert "is not finite; a retry from the newest checkpoint ended in the same way" in second.message
    assert isinstance(ends(again, checkpoint=9), Restart), "it went past the step that had failed"


def test_damaged_data_fails_the_job_at_once_whichever_rank_is_reported_first() -> None:
    owner = admitted(job())
    exits = [{"rank": 0, "code": 7}, {"rank": 1, "code": 8}]
    said = verdict(running(owner, lease=lease(owner, phase="Training", step=10, exits=exits, message="sample x")))
    assert isinstance(said, GiveUp)
    assert said.reason == "DataDamaged"
    assert said.message == "rank 1 on worker 1 exited with code 8: sample x"


def test_killed_rank_is_the_cause_although_a_rank_that_lost_it_is_reported_first() -> None:
    owner = admitted(job())
    exits = [{"rank": 0, "code": 7}, {"rank": 1, "signal": 9}]
    said = verdict(running(owner, lease=lease(owner, phase="Training", step=10, exits=exits, message="")))
    assert isinstance(said, Restart)
    assert (str(said.failure.cause), said.failure.index) == ("RankKilled", 1)


def test_a_worker_whose_launcher_was_asked_to_end_is_replaced_and_no_budget_pays() -> None:
    owner = admitted(job())
    left = lease(owner, phase="Training", step=10, exits=[{"rank": 1, "code": 75}], leaving=[1])
    said = verdict(running(owner, lease=left))
    assert isinstance(said, Restart)
    assert (str(said.failure.cause), set(said.replace), said.record.counts, said.due_s) == (
        "Evicted",
        {1},
        False,
        NOW_S,
    )


def test_a_worker_whose_launcher_fell_silent_gets_a_new_pod() -> None:
    owner = admitted(job())
    said = verdict(running(owner, lease=lease(owner, phase="Training", step=10, outcome="Failed", leaving=[1])))
    assert isinstance(said, Restart)
    assert (str(said.failure.cause), set(said.replace)) == ("PodLost", {1})


def waits_for_retry(owner: JobView) -> JobSnapshot:
    """Worker 1's pod was never created."""
    waiting = dataclasses.replace(owner, status=owner.status.model_copy(update={"retry_at": rfc3339(NOW_S)}))
    return running(waiting, pods=(pod(owner, 0),), lease=lease(owner, released=False, joined=1))


def lost_node(owner: JobView) -> JobSnapshot:
    gone = {"n0": node(), "n1": node("n1", ready=False, not_ready_since_s=NOW_S - 3600)}
    quiet = lease(owner, phase="Training", step=10, leaving=[1])
    return running(owner, pods=(pod(owner, 0), pod(owner, 1, where="n1")), nodes=gone, lease=quiet)


def failed_pod(owner: JobView) -> JobSnapshot:
    return running(owner, pods=(pod(owner, 0), pod(owner, 1, phase=PodPhase.FAILED)))


def keyed(owner: JobView, key_id: str, *known: str) -> JobView:
    """A job whose attempt has a key, of an operator that has these."""
    attempt = None if owner.attempt is None else owner.attempt.model_copy(update={"key_id": key_id})
    return dataclasses.replace(owner, status=owner.status.model_copy(update={"attempt": attempt}), key_ids=known)


@pytest.mark.parametrize("seen", [waits_for_retry, lost_node, failed_pod])
def test_a_pod_that_could_not_join_the_others_replaces_them_all(seen: Callable[[JobView], JobSnapshot]) -> None:
    """A new pod gets another key than the pods that stay, if the operator has theirs no longer."""
    owner = admitted(job(), ("n0", "n1"))
    found = verdict(seen(owner))
    assert found.replace == {1}
    assert verdict(seen(keyed(owner, "old", "new", "old"))).replace == {1}
    renewed = verdict(seen(keyed(owner, "old", "new")))
    assert (renewed.replace, renewed.scope, renewed.move) == ({0, 1}, Scope.GANG, found.move)
    assert renewed.record.message == found.record.message


def test_a_gang_whose_key_the_installation_has_no_longer_starts_again_at_no_budgets_cost() -> None:
    owner = admitted(job(failurePolicy={"maxRestarts": 0}))
    found = verdict(running(keyed(owner, "old", "new")))
    assert isinstance(found, Restart)
    assert (str(found.failure.cause), found.scope, found.record.counts) == ("KeyLost", Scope.GANG, False)
    after = restart(running(keyed(owner, "old", "new")), found, ["n0", "n0"], NOW_S)
    assert after.attempt is not None
    assert (after.attempt.key_id, after.attempt.secret_name) == ("new", "j-uidj-new")


@pytest.mark.parametrize(
    ("replace", "scope", "expected"),
    [((), Scope.PROCESS, "old"), ((1,), Scope.POD, "old"), ((0, 1), Scope.GANG, "new"), ((), Scope.RESUME, "new")],
)
def test_a_gang_keeps_the_key_of_the_pods_that_stay(replace: tuple[int, ...], scope: Scope, expected: str) -> None:
    after = StatusBuilder(keyed(admitted(job()), "old", "new", "old"), NOW_S)
    begin_attempt(after, nodes=["n0", "n0"], replace=replace, scope=scope)
    attempt = after.build().attempt
    assert attempt is not None
    assert (attempt.key_id, attempt.secret_name) == (expected, "j-uidj-new" if expected == "new" else "")


def test_exit_code_7_waits_before_it_tries_again_and_names_the_environment_in_the_end() -> None:
    owner = admitted(job())
    ended = lease(owner, exits=[{"rank": 0, "code": 7}])
    first = verdict(running(owner, lease=ended))
    assert isinstance(first, Restart)
    assert first.due_s == NOW_S + 5
    spent = dataclasses.replace(owner, status=owner.status.model_copy(update={"restart_records": restarted(3)}))
    last = verdict(running(spent, lease=ended))
    assert isinstance(last, GiveUp)
    assert last.reason == "EnvironmentFailed"


@pytest.mark.parametrize("record", [{"attempt": 2}, {"replacement": 1}])
def test_a_stale_record_never_counts(record: dict[str, int]) -> None:
    owner = admitted(job())
    stale = lease(owner, exits=[{"rank": 0, "signal": 9}], **record)
    assert verdict(running(owner, lease=stale)) == Healthy()


@pytest.mark.parametrize(("tries", "scope"), [(0, "RestartProcess"), (1, "RestartProcess"), (2, "RestartPod")])
def test_a_worker_that_fails_again_and_again_gets_a_new_pod(tries: int, scope: str) -> None:
    owner = admitted(job(), restart_records=restarted(tries, step=1))
    said = verdict(running(owner, lease=lease(owner, step=50, exits=[{"rank": 1, "signal": 9}])))
    assert isinstance(said, Restart)
    assert said.scope == scope
    assert said.replace == (frozenset({1}) if scope == "RestartPod" else frozenset())


@pytest.mark.parametrize(
    ("second", "cause"),
    [
        ({"phase": PodPhase.FAILED}, "PodFailed"),
        ({"phase": PodPhase.SUCCEEDED}, "PodLost"),
        ({"deleting": True}, "PodLost"),
        (None, "PodLost"),
    ],
)
def test_a_pod_that_is_gone_is_replaced(second: dict[str, Any] | None, cause: str) -> None:
    owner = admitted(job())
    pods = (pod(owner, 0),) if second is None else (pod(owner, 0), pod(owner, 1, **second))
    said = verdict(running(owner, pods=pods))
    assert isinstance(said, Restart)
    assert (said.failure.cause, said.scope, said.replace) == (cause, "RestartPod", frozenset({1}))


def test_a_pod_that_was_never_created_is_no_loss() -> None:
    owner = admitted(job(), replicas=1)
    waiting = lease(owner, released=False, joined=1)
    assert verdict(running(owner, pods=(pod(owner, 0),), lease=waiting)) == Healthy()


@pytest.mark.parametrize(
    ("away", "moved"),
    [
        ({"ready": False, "not_ready_since_s": NOW_S - 59}, False),
        ({"ready": False, "not_ready_since_s": NOW_S - 60}, True),
        ({"out_of_service": True}, True),
    ],
)
def test_a_node_is_lost_after_its_time_or_by_its_taint(away: dict[str, Any], moved: bool) -> None:
    owner = admitted(job(), ("n0", "n1"))
    nodes = {"n0": node(), "n1": node("n1", **away)}
    pods = (pod(owner, 0), pod(owner, 1, where="n1"))
    said = verdict(running(owner, pods=pods, nodes=nodes, lease=lease(owner, step=10, leaving=[1])))
    assert isinstance(said, Restart) == moved
    if moved:
        assert (said.failure.cause, said.move) == ("NodeLost", frozenset({1}))


@pytest.mark.parametrize("silent_s", [0, 20, 28])
def test_a_node_that_is_not_ready_is_not_lost_while_its_ranks_report(silent_s: int) -> None:
    """A kubelet that is silent says nothing of its pods; the time counts from the gang's last report."""
    owner = admitted(job(), ("n0", "n1"))
    nodes = {"n0": node(), "n1": node("n1", ready=False, not_ready_since_s=NOW_S - 3600)}
    pods = (pod(owner, 0), pod(owner, 1, where="n1"))
    seen = running(owner, pods=pods, nodes=nodes, lease=lease(owner, step=10, seen_s=NOW_S - silent_s))
    assert verdict(seen) == Healthy()
    assert decide(seen).wake_at_s == NOW_S - silent_s + 30, "the silent leader comes before the lost node"
    unreleased = running(owner, pods=pods, nodes=nodes, lease=lease(owner, released=False, joined=1))
    assert verdict(unreleased).failure.cause == "NodeLost"


@pytest.mark.parametrize(("silent_s", "lost"), [(29, False), (30, True)])
def test_a_silent_leader_costs_its_pod(silent_s: int, lost: bool) -> None:
    owner = admitted(job())
    said = verdict(running(owner, lease=lease(owner, seen_s=NOW_S - silent_s)))
    assert isinstance(said, Restart) == lost
    if lost:
        assert (said.failure.cause, said.replace) == ("LeaderSilent", frozenset({0}))


def test_a_gang_that_never_joins_is_replaced_whole() -> None:
    owner = admitted(job(), at_s=NOW_S - 600)
    said = verdict(running(owner, lease=lease(owner, released=False, joined=1)))
    assert isinstance(said, Restart)
    assert (said.failure.cause, said.scope, said.replace) == ("StartTimedOut", "RestartGang", frozenset({0, 1}))


@pytest.mark.parametrize(
    ("rule", "kind", "scope", "counts"),
    [
        ({"action": "Fail", "onExitCodes": {"operator": "In", "values": [137]}}, GiveUp, None, None),
        ({"action": "RestartGang", "onExitCodes": {"operator": "In", "values": [137]}}, Restart, "RestartGang", True),
        ({"action": "Ignore", "onExitCodes": {"operator": "In", "values": [137]}}, Restart, "RestartProcess", False),
        ({"action": "Fail", "onExitCodes": {"operator": "NotIn", "values": [137]}}, Restart, "RestartProcess", True),
        (
            {"action": "RestartPod", "countTowardsMax": False, "onExitCodes": {"operator": "In", "values": [137]}},
            Restart,
            "RestartPod",
            False,
        ),
    ],
)
def test_the_first_rule_that_matches_decides(rule: dict[str, Any], kind: type, scope: str, counts: bool) -> None:
    owner = admitted(job(failurePolicy={"rules": [rule, {"action": "Fail", "onPodConditions": [{"type": "X"}]}]}))
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 0, "signal": 9}])))
    assert isinstance(said, kind)
    if isinstance(said, Restart):
        assert (said.scope, said.record.counts) == (scope, counts)


def test_restarts_beyond_the_budget_fail_the_job() -> None:
    owner = admitted(job(failurePolicy={"maxRestarts": 2, "noProgressMax": 9}), restart_records=restarted(2))
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 0, "signal": 9}])))
    assert isinstance(said, GiveUp)
    assert said.reason == "MaxRestartsExceeded"


def test_restarts_outside_the_window_are_forgotten() -> None:
    policy = {"maxRestarts": 2, "noProgressMax": 9, "windowSeconds": 50}
    owner = admitted(job(failurePolicy=policy), restart_records=restarted(2))
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 0, "signal": 9}])))
    assert isinstance(said, Restart)


@pytest.mark.parametrize(("idle", "wait_s"), [(0, 0), (1, 5), (2, 10), (3, None)])
def test_each_restart_without_progress_waits_longer_until_none_is_left(idle: int, wait_s: int | None) -> None:
    owner = admitted(job(failurePolicy={"inPlaceMax": 9}), restart_records=restarted(idle))
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 1, "signal": 9}])))
    if wait_s is None:
        assert isinstance(said, GiveUp)
        assert said.reason == "NoProgress"
    else:
        assert isinstance(said, Restart)
        assert said.due_s == NOW_S + wait_s


def test_progress_forgives_earlier_restarts() -> None:
    idle = restarted(2)
    assert restarts_without_progress(idle) == 2
    assert restarts_without_progress([*idle, *restarted(1, step=5)]) == 0
    assert restarts_without_progress([*idle, *restarted(1, checkpoint_step=5)]) == 0


def test_budgets_count_every_restart_of_their_window_however_many_records_are_kept() -> None:
    most = 3 * RESTART_RECORDS_MAX
    policy = {"maxRestarts": most, "noProgressMax": 1000, "windowSeconds": 1000}
    status = admitted(job(failurePolicy=policy)).status
    for number in range(most - 1):
        (record,) = restarted(1, step=number + 1)
        update = {"attempt": number + 1, "at": rfc3339(NOW_S - most + number), "counts": number != 5}
        status = with_restart(status, record.model_copy(update=update))
    assert len(status.restart_records) == RESTART_RECORDS_MAX

    def judged(before: TrainingJobStatus) -> object:
        owner = admitted(job(failurePolicy=policy), restart_records=before.restart_records)
        status = owner.status.model_copy(update={"earlier_restarts": before.earlier_restarts})
        owner = dataclasses.replace(owner, status=status)
        found = snapshot(
            owner, pods=(pod(owner, 0), pod(owner, 1)), lease=lease(owner, exits=[{"rank": 0, "signal": 9}])
        )
        assert owner.spec is not None
        return judge(found, owner.spec, NOW_S)

    assert isinstance(judged(status), Restart)
    (last,) = restarted(1, step=most)
    status = with_restart(status, last.model_copy(update={"at": rfc3339(NOW_S)}))
    assert isinstance(judged(status), Restart)
    status = with_restart(status, last.model_copy(update={"at": rfc3339(NOW_S)}))
    given_up = judged(status)
    assert isinstance(given_up, GiveUp)
    assert given_up.reason is Reason.MAX_RESTARTS_EXCEEDED


def test_a_streak_without_progress_is_longer_than_the_records_that_are_kept() -> None:
    status = admitted(job()).status
    for step in (100, *[7, 8, 9] * RESTART_RECORDS_MAX):
        (record,) = restarted(1, step=step)
        status = with_restart(status, record)
    assert restarts_without_progress(status.restart_records, status.earlier_restarts) == 3 * RESTART_RECORDS_MAX


def test_a_newer_checkpoint_on_the_lease_is_progress_and_is_put_on_record() -> None:
    """The attempt stopped at an earlier step than others did, but what it saved is newer than all before."""
    before = restarted(4, step=50, checkpoint_step=20)
    owner = admitted(job(failurePolicy={"inPlaceMax": 9}), restart_records=before)
    record: dict[str, Any] = {"step": 30, "exits": [{"rank": 1, "signal": 9}]}
    idle = verdict(running(owner, lease=lease(owner, **record, checkpoint={"attempt": 1, "step": 20})))
    assert isinstance(idle, GiveUp)
    progressed = verdict(running(owner, lease=lease(owner, **record, checkpoint={"attempt": 1, "step": 24})))
    assert isinstance(progressed, Restart)
    assert (progressed.record.checkpoint_step, progressed.due_s) == (24, NOW_S)


def test_the_checkpoint_on_the_status_counts_where_the_lease_names_none() -> None:
    saved = {"attempt": 1, "step": 12, "at": rfc3339(NOW_S)}
    owner = admitted(job(), last_checkpoint=LastCheckpoint.model_validate(saved))
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 1, "signal": 9}])))
    assert isinstance(said, Restart)
    assert said.record.checkpoint_step == 12


def test_progress_is_more_than_the_most_that_any_attempt_reached() -> None:
    def streak(*saved: int) -> int:
        records = [restarted(1, step=5, checkpoint_step=step)[0] for step in saved]
        return restarts_without_progress(records)

    assert streak(5) == 0
    assert streak(5, 3, 4) == 2
    assert streak(5, 3, 6) == 0


def test_the_newest_checkpoint_is_remembered_beyond_the_records_that_are_kept() -> None:
    status = admitted(job()).status
    for saved in (100, *[7, 8, 9] * RESTART_RECORDS_MAX):
        (record,) = restarted(1, checkpoint_step=saved)
        status = with_restart(status, record)
    assert restarts_without_progress(status.restart_records, status.earlier_restarts) == 3 * RESTART_RECORDS_MAX


@pytest.mark.parametrize(("seen_s_ago", "healthy"), [(None, True), (5, True), (601, False)])
def test_a_gang_whose_lease_was_deleted_has_its_start_timeout_to_say_that_it_works_on_the_new_one(
    seen_s_ago: int | None, healthy: bool
) -> None:
    owner = admitted(job(), at_s=NOW_S - 10_000)
    empty = dataclasses.replace(lease(owner), record=None, advanced_seen_s=NOW_S - (seen_s_ago or 0))
    said = verdict(running(owner, lease=None if seen_s_ago is None else empty))
    if healthy:
        assert isinstance(said, Healthy)
    else:
        assert isinstance(said, Restart)
        assert said.failure.cause == "StartTimedOut"


@pytest.mark.parametrize("ignored", [True, False])
def test_a_failure_that_counts_towards_nothing_is_retried_when_the_budget_is_spent(ignored: bool) -> None:
    rule = {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [137 if ignored else 1]}}
    policy = {"maxRestarts": 2, "noProgressMax": 100, "rules": [rule]}
    owner = admitted(job(failurePolicy=policy), restart_records=restarted(2))
    said = verdict(running(owner, lease=lease(owner, exits=[{"rank": 0, "signal": 9}])))
    assert isinstance(said, Restart if ignored else GiveUp)
