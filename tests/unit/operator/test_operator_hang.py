"""Hangs: when they are reported, when they end an attempt, and when restarting for them stops."""

import dataclasses
from typing import Any

import pytest

from polyreme_api.job.status import RestartRecord
from polyreme_api.progress import CheckpointRef, RankPhase, StallEvidence, StallKind
from polyreme_operator.cache.leases import LeaseIndex
from polyreme_operator.reconcile.failure_policy import Restart, judge
from polyreme_operator.reconcile.hang import find_stall, futile_restarts
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.observe import current_record
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.types.actions import EmitEvent, WriteStatus
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.reasons import Cause, Reason, Scope
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import LeaseView
from tests.unit.operator.operator_scenes import (
    NOW_S,
    admitted,
    decide,
    job,
    lease,
    owner_reference,
    pod,
    snapshot,
    written,
)

STALL_S = 20
DEFAULTS = PodDefaults()
MESSAGE = "no rank has advanced for 20 s in step 8; rank 1 on worker 1 is in no exchange, and 1 ranks wait in one"
EVIDENCE = StallEvidence(
    kind=StallKind.OUTSIDE, suspects=(1,), step=8, quiet_seconds=STALL_S, confirmed=True, message=MESSAGE
)


def stalling(
    *,
    action: str = "Restart",
    seen_s: float = STALL_S,
    said_s: float = STALL_S,
    records: list[RestartRecord] | None = None,
    **record: Any,
) -> JobSnapshot:
    """Two workers at step 7, whose last step was seen ``seen_s`` and said ``said_s`` before the newest record.

    The leader's launcher holds that rank 1 has held up the others for ``STALL_S``.
    """
    owner = job(health={"hang": {"action": action, "stallSeconds": STALL_S}})
    owner = admitted(owner, at_s=NOW_S - 100, restart_records=records or [])
    fields = {"phase": RankPhase.TRAINING, "step": 7, "updated_at_s": NOW_S, "stall": EVIDENCE, **record}
    view = lease(owner, seen_s=NOW_S, **fields)
    view = dataclasses.replace(view, advanced_seen_s=NOW_S - seen_s, advanced_said_s=NOW_S - said_s)
    return snapshot(owner, pods=(pod(owner, 0), pod(owner, 1)), lease=view)


def verdict(found: JobSnapshot) -> object:
    assert found.job.spec is not None
    return judge(found, found.job.spec, NOW_S)


def restarted(step: int, cause: Cause = Cause.HUNG) -> RestartRecord:
    return RestartRecord(attempt=1, at="2023-11-14T22:13:20Z", cause=cause, scope=Scope.PROCESS, step=step)


@pytest.mark.parametrize(
    ("fields", "told", "fatal"),
    [
        ({}, True, True),
        ({"action": "Notify"}, True, False),
        ({"stall": EVIDENCE.model_copy(update={"confirmed": False})}, True, False),
        ({"stall": None}, False, False),
        ({"seen_s": STALL_S / 2 - 1}, False, False),
        ({"said_s": STALL_S / 2 - 1}, False, False),
        ({"phase": RankPhase.LOADING}, True, True),
        ({"released": False}, False, False),
        ({"attempt": 2}, False, False),
        ({"records": [restarted(7), restarted(7)]}, True, False),
        ({"records": [restarted(7)]}, True, True),
        ({"records": [restarted(5), restarted(5), restarted(5, Cause.RANK_KILLED)]}, True, True),
    ],
)
def test_a_stall_is_reported_and_ends_the_attempt_by_policy_with_two_signals(
    fields: dict[str, Any], told: bool, fatal: bool
) -> None:
    found = stalling(**fields)
    assert found.job.spec is not None
    stall = find_stall(found, found.job.spec, current_record(found))
    assert (stall is not None) == told
    assert (stall is not None and stall.fatal) == fatal
    assert isinstance(verdict(found), Restart) == fatal


def test_a_restart_for_a_hang_is_in_place_counts_and_says_why() -> None:
    found = verdict(stalling())
    assert isinstance(found, Restart)
    assert (found.failure.cause, found.scope, found.record.counts, found.replace) == (
        Cause.HUNG,
        Scope.PROCESS,
        True,
        frozenset(),
    )
    assert found.record.message == MESSAGE
    assert found.record.index == 1, "the worker of the rank that holds up the others, not one that waits for it"


def test_the_time_of_a_hang_is_lost_to_it_and_not_to_the_start() -> None:
    status = written(decide(stalling(step_seconds=2.0, checkpoint=CheckpointRef(attempt=1, step=5))))
    lost = {entry.cause: entry.milliseconds for entry in status.accounting.lost}
    assert (status.accounting.effective_milliseconds, lost) == (10_000, {"Hung": 4_000 + 20_000, "Starting": 66_000})


@pytest.mark.parametrize("action", ["Restart", "Notify"])
@pytest.mark.parametrize(("said", "why"), [("timed out", ": timed out"), ("", "")])
def test_a_rank_that_gave_up_waiting_for_another_is_not_blamed(action: str, said: str, why: str) -> None:
    """The rank ended the attempt itself, so it is restarted whatever is to follow from hangs."""
    exits = [{"rank": 0, "code": 7}]
    found = verdict(stalling(action=action, seen_s=1.0, exits=exits, message=said))
    assert isinstance(found, Restart)
    assert (found.failure.cause, found.failure.index) == (Cause.HUNG, 1)
    assert found.record.message == f"{MESSAGE}; rank 0 gave up waiting{why}"


def test_hangs_stop_to_restart_after_two_that_brought_no_later_step_and_start_again_behind_one() -> None:
    twice = [restarted(3), restarted(7), restarted(7)]
    assert futile_restarts(twice, 7) == 2
    assert futile_restarts(twice, 8) == 0
    assert futile_restarts([*twice, restarted(9, Cause.RANK_KILLED)], 9) == 0
    message = "not restarted: 2 restarts because of hangs reached no later step"
    found = stalling(records=[restarted(7), restarted(7)])
    (write,) = (action for action in decided(found) if isinstance(action, WriteStatus))
    running = write.after.condition("Running")
    assert running is not None
    assert message in running.message


def test_a_stall_is_a_condition_and_one_event() -> None:
    found = stalling(action="Notify")
    actions = decided(found)
    (write,) = (action for action in actions if isinstance(action, WriteStatus))
    running = write.after.condition("Running")
    assert running is not None
    assert (running.status, running.reason) == ("False", Reason.STALLED)
    assert running.message == MESSAGE
    assert [action.reason for action in actions if isinstance(action, EmitEvent)] == [Reason.STALLED]
    again = dataclasses.replace(found, job=dataclasses.replace(found.job, status=write.after))
    assert found.lease is not None
    assert found.lease.record is not None
    other = found.lease.record.model_copy(update={"data_wait_seconds": 1.0})
    again = dataclasses.replace(again, lease=dataclasses.replace(found.lease, record=other))
    assert decided(again) == ()


def test_time_without_a_step_is_counted_from_the_record_that_first_said_it() -> None:
    owner = admitted(job())

    index = LeaseIndex(JobKeys(), {owner.ref: owner}.get)

    def read(seen_s: float, **record: Any) -> LeaseView:
        view = lease(owner, **record)
        assert view.record is not None
        manifest = {
            "metadata": {
                "name": view.name,
                "uid": view.uid,
                "resourceVersion": "1",
                "ownerReferences": [owner_reference(owner.name)],
                "annotations": {"polyreme.dev/progress": view.record.model_dump_json(by_alias=True)},
            }
        }
        index.put(view.ref, manifest, seen_s)
        return index.by_job[owner.uid]

    read(100.0, step=3, updated_at_s=50.0)
    same = read(110.0, step=3, updated_at_s=52.0)
    assert (same.seen_s, same.advanced_seen_s, same.advanced_said_s) == (110.0, 100.0, 50.0)
    later = read(120.0, step=4, updated_at_s=54.0)
    assert (later.advanced_seen_s, later.advanced_said_s) == (120.0, 54.0)


def decided(found: JobSnapshot) -> tuple[object, ...]:
    return reconcile(found, NOW_S, defaults=DEFAULTS).actions


def test_a_notice_of_rank_0_is_the_message_of_the_condition_running_while_it_trains() -> None:
    words = "extends the run from step 100 to 200: spec.training.steps: 100 -> 200"
    seen = stalling(seen_s=0, said_s=0, stall=None, released=True, joined=2, notice=words, message="another")
    running = written(decide(seen)).condition("Running")
    assert running is not None
    assert (running.status, running.reason, running.message) == ("True", Reason.TRAINING, words)
