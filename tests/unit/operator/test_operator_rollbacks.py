"""Spikes of the loss: an attempt that rolled back restarts at once; after too many the job is paused."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_operator.cache.jobs import waits
from polyreme_operator.reconcile.failure_policy import Pause, Restart, judge, restarts_without_progress, with_restart
from polyreme_operator.types.actions import EmitEvent
from polyreme_operator.types.reasons import Cause
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView
from tests.unit.operator.operator_scenes import NOW_S, admitted, decide, job, lease, pod, snapshot, written

WORDS = "spike in step 26: loss 4.6, limit 0.01"


def ended(owner: JobView, code: int) -> JobSnapshot:
    exits = [{"rank": 1, "code": code}, {"rank": 0, "code": code}]
    said = lease(owner, phase="Training", step=25, stepSeconds=1.0, exits=exits, message=WORDS)
    return snapshot(owner, lease=said, pods=(pod(owner, 0), pod(owner, 1)))


def verdict(seen: JobSnapshot) -> Any:
    assert seen.job.spec is not None
    return judge(seen, seen.job.spec, NOW_S)


def test_a_rollback_restarts_the_ranks_in_place_at_once_and_no_budget_pays() -> None:
    owner = admitted(job())
    for _ in range(3):
        said = verdict(ended(owner, 102))
        assert isinstance(said, Restart)
        assert (said.failure.cause, said.scope, said.failure.index) == ("LossSpike", "RestartProcess", None)
        assert (said.due_s, said.record.counts, said.record.message) == (NOW_S, False, WORDS)
        owner = dataclasses.replace(owner, status=with_restart(owner.status, said.record))


def test_steps_that_are_trained_again_after_a_rollback_are_progress() -> None:
    record = verdict(ended(admitted(job()), 102)).record
    killed = record.model_copy(update={"cause": Cause.RANK_KILLED.value, "step": 20})
    assert restarts_without_progress([record, killed]) == 0
    assert restarts_without_progress([record, killed, killed]) == 1


def test_a_run_whose_spikes_persist_is_paused_until_its_spec_changes() -> None:
    owner = admitted(job())
    seen = ended(owner, 103)
    assert isinstance(verdict(seen), Pause)
    decision = decide(seen)
    after = written(decision)
    told = [(each.reason, each.warning) for each in decision.actions if isinstance(each, EmitEvent)]
    assert told == [("LossSpikes", True)]
    suspended = after.condition("Suspended")
    assert suspended is not None
    assert (suspended.status, suspended.reason) == ("True", "LossSpikes")
    assert suspended.message == f"{WORDS}; paused until the spec changes, or the job is suspended and resumed"
    assert not after.is_true("Admitted")
    assert after.attempt is not None
    assert after.attempt.desired == "Stop"
    assert after.restart_records[-1].cause == "LossSpike"
    paused = dataclasses.replace(owner, status=after)
    assert paused.paused
    assert not waits(paused), "it takes no place in its queue"
    still = written(decide(snapshot(paused)))
    assert still.condition("Suspended") == suspended
    changed = dataclasses.replace(paused, generation=paused.generation + 1)
    assert waits(changed)
    resumed = written(decide(snapshot(changed))).condition("Suspended")
    assert resumed is not None
    assert (resumed.status, resumed.reason) == ("False", "Resumed")
