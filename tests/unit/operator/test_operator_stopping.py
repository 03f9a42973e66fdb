"""Attempts that stop on request: preemption, drained queues, suspend and resize share one way to stop."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.times import rfc3339
from polyreme_operator.reconcile import stopping, transition
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.stopping import StopFor
from polyreme_operator.types.actions import Decision, DeletePod, EmitEvent, ReadLease, WriteStatus
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.snapshot import Pending
from polyreme_operator.types.views import JobView, PodPhase
from tests.unit.operator.operator_scenes import NOW_S, admitted, decide, job, lease, pod, snapshot, written

GRACE_S = 60


def told(decision: Decision) -> list[str]:
    return [action.reason for action in decision.actions if isinstance(action, EmitEvent)]


def displaced(*, reclaim: bool = False, **spec: Any) -> JobView:
    owner = admitted(job(**spec))
    by = job("urgent", priority=10)
    asked = transition.stop_for_preemption(owner, by, reclaim=reclaim, now_s=NOW_S)
    return dataclasses.replace(owner, status=asked)


def pods_of(owner: JobView, **fields: Any) -> tuple[Any, ...]:
    return (pod(owner, 0, **fields), pod(owner, 1, **fields))


def ended(owner: JobView, *, step: int = 10, durable: int = 10, **record: Any) -> Any:
    return lease(owner, step=step, stepSeconds=2.0, checkpoint={"attempt": 1, "step": durable}, **record)


def test_a_preempted_job_is_asked_to_checkpoint_and_keeps_its_devices_meanwhile() -> None:
    owner = displaced()
    attempt, asked = owner.attempt, owner.status.preemption
    assert attempt is not None
    assert asked is not None
    assert (attempt.desired, attempt.checkpoint_requested) == ("Stop", True)
    assert (asked.by, asked.by_name) == ("uid-urgent", "default/urgent")
    assert (asked.requested_at, asked.deadline) == (rfc3339(NOW_S), rfc3339(NOW_S + GRACE_S))
    preempted = owner.status.condition("Preempted")
    assert preempted is not None
    assert (preempted.status, preempted.reason) == ("True", "Preempting")
    assert owner.admitted
    decision = decide(snapshot(owner, pods=pods_of(owner), lease=lease(owner, step=9)))
    assert decision == Decision(wake_at_s=NOW_S + GRACE_S)


@pytest.mark.parametrize(("reclaim", "reason"), [(False, "Preempted"), (True, "Reclaimed")])
def test_what_has_stopped_gives_its_admission_back_and_waits_at_its_place(reclaim: bool, reason: str) -> None:
    owner = displaced(reclaim=reclaim)
    decision = decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped")), NOW_S + 5)
    status = written(decision)
    queued, preempted = status.condition("Queued"), status.condition("Preempted")
    assert queued is not None
    assert preempted is not None
    assert not status.is_true("Admitted")
    assert (queued.status, queued.reason) == ("True", reason)
    assert (preempted.status, preempted.reason) == ("True", reason)
    assert "default/urgent" in queued.message
    assert [(record.by, record.at) for record in status.preemptions] == [("uid-urgent", rfc3339(NOW_S))]
    assert status.preemption_count == 1
    assert status.preemption is not None, "who it made way for stays known until it is admitted anew"
    assert status.attempt is not None
    assert (status.attempt.number, status.attempt.desired, status.restarts) == (1, "Stop", 0)
    assert told(decision) == [reason]


def test_pods_go_behind_the_write_and_the_job_is_queued_for_its_next_attempt() -> None:
    owner = displaced()
    status = written(decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped")), NOW_S + 5))
    waiting = dataclasses.replace(owner, status=status)
    pending = Pending(reason=Reason.WAITING_FOR_CAPACITY, message="needs 2 devices; 0 free on 0 nodes")
    decision = decide(snapshot(waiting, pods=pods_of(waiting), pending=pending), NOW_S + 6)
    assert len([action for action in decision.actions if isinstance(action, DeletePod)]) == 2
    queued = written(decision).condition("Queued")
    assert queued is not None
    assert queued.reason == "WaitingForCapacity"
    again = transition.admit(waiting, ("n0", "n0"), NOW_S + 60)
    preempted = again.condition("Preempted")
    assert preempted is not None
    assert (preempted.status, preempted.reason) == ("False", "Admitted")
    assert again.preemption is None
    assert again.preemption_count == 1
    assert again.attempt is not None
    assert (again.attempt.number, again.attempt.replacement(0)) == (2, 1)


def test_a_success_that_is_reported_after_the_deadline_ends_the_waiting_job() -> None:
    owner = displaced()
    late = NOW_S + GRACE_S
    status = written(decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, step=48, durable=48)), late))
    waiting = dataclasses.replace(owner, status=status)
    assert not waiting.admitted
    told = ended(waiting, step=50, durable=50, outcome="Succeeded")
    after = written(decide(snapshot(waiting, pods=pods_of(waiting), lease=told), late + 5))
    assert after.is_true("Succeeded")
    assert not after.is_true("Queued")
    assert after.step == 50
    assert after.last_checkpoint is not None
    assert after.last_checkpoint.step == 50
    assert after.accounting.effective_milliseconds == status.accounting.effective_milliseconds
    assert after.accounting.lost == status.accounting.lost, (
        "the attempt's time was charged when it gave its devices back"
    )


def test_only_what_lies_behind_the_durable_checkpoint_is_lost() -> None:
    owner = displaced()
    seen = snapshot(owner, pods=pods_of(owner), lease=ended(owner, step=10, durable=8, outcome="Stopped"))
    status = written(decide(seen))
    lost = {entry.cause: entry.milliseconds for entry in status.accounting.lost}
    assert (status.accounting.effective_milliseconds, lost) == (16_000, {"Preempted": 4_000, "Starting": 80_000})
    assert status.last_checkpoint is not None
    assert status.last_checkpoint.step == 8
    kept = written(decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped"))))
    assert kept.accounting.effective_milliseconds == 20_000
    assert kept.accounting.goodput == "0.2000"


def test_the_start_after_a_preemption_is_time_lost_to_it() -> None:
    owner = displaced()
    status = written(decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped"))))
    owner = dataclasses.replace(owner, status=status)
    owner = dataclasses.replace(owner, status=transition.admit(owner, ("n0", "n0"), NOW_S))
    told_ = lease(owner, attempt=2, replacement=1, step=10, resumedFromStep=10, stepSeconds=2.0, outcome="Succeeded")
    after = written(decide(snapshot(owner, pods=(), lease=told_), NOW_S + 30))
    lost = {entry.cause: entry.milliseconds for entry in after.accounting.lost}
    assert lost == {"Starting": 80_000, "Preempted": 30_000}


def test_one_that_does_not_obey_is_evicted_at_its_deadline_and_not_before() -> None:
    owner = displaced()
    seen = snapshot(owner, pods=pods_of(owner), lease=ended(owner, durable=4))
    assert not any(isinstance(action, WriteStatus) for action in decide(seen, NOW_S + GRACE_S - 1).actions)
    status = written(decide(seen, NOW_S + GRACE_S))
    assert not status.is_true("Admitted")
    assert {entry.cause for entry in status.accounting.lost} == {"Preempted", "Starting"}


def test_pods_of_the_past_have_nothing_to_save_but_one_of_the_attempt_has() -> None:
    begun = admitted(job())
    attempt = begun.status.attempt
    assert attempt is not None
    second = attempt.model_copy(update={"number": 2, "replacements": [[1, 2]]})
    begun = dataclasses.replace(begun, status=begun.status.model_copy(update={"attempt": second}))
    asked = transition.stop_for_preemption(begun, job("urgent", priority=10), reclaim=False, now_s=NOW_S)
    owner = dataclasses.replace(begun, status=asked)
    past = pods_of(owner)
    assert not written(decide(snapshot(owner, pods=past, lease=lease(owner)))).is_true("Admitted")
    assert decide(snapshot(owner, pods=(*past, pod(owner, 1, replacement=1)), lease=lease(owner))) == Decision(
        wake_at_s=NOW_S + GRACE_S
    )


def test_a_success_that_comes_meanwhile_wins_and_the_lease_is_read_first() -> None:
    owner = displaced()
    quiet = pods_of(owner, phase=PodPhase.SUCCEEDED)
    unread = decide(snapshot(owner, pods=quiet, lease=lease(owner), lease_read=False))
    assert [type(action) for action in unread.actions] == [ReadLease]
    status = written(
        decide(snapshot(owner, pods=quiet, lease=ended(owner, step=50, phase="Done", outcome="Succeeded")))
    )
    assert status.is_true("Succeeded")
    assert (status.preemption, status.preemptions) == (None, [])
    assert not status.is_true("Preempted")


def test_the_word_of_an_older_attempt_ends_no_stop() -> None:
    owner = displaced()
    stale = lease(owner, replacement=7, outcome="Stopped")
    assert decide(snapshot(owner, pods=pods_of(owner), lease=stale)).actions == ()


def test_a_job_that_stops_already_is_asked_nothing_more() -> None:
    owner = displaced()
    other = job("other", priority=20)
    assert transition.stop_for_preemption(owner, other, reclaim=False, now_s=NOW_S + 9) is owner.status
    suspended = admitted(job(suspend=True))
    suspended = dataclasses.replace(suspended, status=transition.stop_for_suspend(suspended, NOW_S))
    assert transition.stop_for_preemption(suspended, other, reclaim=False, now_s=NOW_S + 9) is suspended.status


def test_a_preemption_goes_before_a_resize_whose_attempt_then_never_begins() -> None:
    owner = admitted(job())
    owner = dataclasses.replace(owner, status=transition.stop_for_resize(owner, NOW_S))
    assert transition.stops_for_resize(owner)
    asked = transition.stop_for_preemption(owner, job("urgent"), reclaim=False, now_s=NOW_S + 1)
    owner = dataclasses.replace(owner, status=asked)
    assert not transition.stops_for_resize(owner)
    stop = stopping.requested_stop(owner)
    assert stop is not None
    assert stop.why is StopFor.PREEMPTION
    status = written(decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped"))))
    assert (status.is_true("Admitted"), status.condition("Restarting")) == (False, None)


def test_a_resize_counts_its_grace_from_its_own_request() -> None:
    owner = admitted(job())
    recovering = StatusBuilder(owner, NOW_S - 900).set(ConditionType.RESTARTING, True, "RankExited")
    owner = dataclasses.replace(owner, status=recovering.build())
    owner = dataclasses.replace(owner, status=transition.stop_for_resize(owner, NOW_S))
    seen = snapshot(owner, pods=pods_of(owner), lease=lease(owner, step=3))
    assert not stopping.has_stopped(seen, NOW_S + 1)
    assert decide(seen).wake_at_s == NOW_S + GRACE_S + stopping.STOP_GRACE_S


def test_a_drained_job_stops_as_a_preempted_one_without_charge() -> None:
    owner = admitted(job())
    owner = dataclasses.replace(owner, status=transition.stop_for_drain(owner, queue="team", now_s=NOW_S))
    decision = decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped")))
    status = written(decision)
    queued = status.condition("Queued")
    assert queued is not None
    assert (queued.reason, queued.message) == ("QueueStopped", "stopped because its queue team is drained")
    assert (status.preemptions, status.preemption_count) == ([], 0)
    assert not status.is_true("Admitted")


def test_a_job_that_is_suspended_while_it_is_preempted_waits_in_no_queue() -> None:
    owner = displaced()
    spec = owner.spec
    assert spec is not None
    owner = dataclasses.replace(owner, spec=spec.model_copy(update={"suspend": True}))
    status = written(decide(snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped"))))
    assert status.is_true("Suspended")
    assert not status.is_true("Queued")
    assert status.preemption_count == 1


def test_the_newest_preemptions_are_kept_and_all_are_counted() -> None:
    owner = displaced()
    for number in range(20):
        status = written(decide(snapshot(owner, pods=(), lease=None), NOW_S + number + 1000 * number + GRACE_S))
        owner = dataclasses.replace(owner, status=status)
        owner = dataclasses.replace(owner, status=transition.admit(owner, ("n0", "n0"), NOW_S + 1000 * number + 500))
        by = job(f"u{number}")
        at_s = NOW_S + 1000 * number + 900
        owner = dataclasses.replace(owner, status=transition.stop_for_preemption(owner, by, reclaim=False, now_s=at_s))
    assert owner.status.preemption_count == 20
    assert [record.by for record in owner.status.preemptions][-1] == "uid-u18"
    assert len(owner.status.preemptions) == 16


def test_an_operator_that_dies_at_any_line_comes_to_the_same_end() -> None:
    """The same passes, each run twice and from the status alone, as a successor would run them."""
    owner = displaced()
    seen = snapshot(owner, pods=pods_of(owner), lease=ended(owner, outcome="Stopped"))
    first, second = decide(seen, NOW_S + 2), decide(seen, NOW_S + 2)
    assert first == second
    after = dataclasses.replace(owner, status=written(first))
    still = decide(snapshot(after, pods=pods_of(after), lease=ended(after, outcome="Stopped")), NOW_S + 3)
    assert [type(action) for action in still.actions if not isinstance(action, WriteStatus)] == [DeletePod, DeletePod]
    going = pods_of(after, deleting=True)
    assert not [action for action in decide(snapshot(after, pods=going)).actions if isinstance(action, DeletePod)]
    assert stopping.requested_stop(after) is None


def test_a_released_gang_whose_pods_are_not_seen_yet_has_not_stopped() -> None:
    """The watch of pods keeps no order with the Lease: who was released had its pods, and may be saving in them."""
    owner = displaced()
    over = pods_of(owner, phase=PodPhase.FAILED)
    for pods, released, stopped in (((), True, False), (over[:1], True, False), (over, True, True), ((), False, True)):
        seen = snapshot(owner, pods=pods, lease=lease(owner, released=released, step=9))
        assert stopping.has_stopped(seen, NOW_S + GRACE_S - 1) == stopped
        assert stopping.has_stopped(seen, NOW_S + GRACE_S)
