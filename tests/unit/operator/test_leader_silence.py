"""A leader that is silent: another pod takes its place, but not while its process is seen to run on this machine."""

from __future__ import annotations

import dataclasses

import pytest

from polyreme_operator.reconcile.observe import RUNNING_SILENCES, find_failure
from polyreme_operator.types.reasons import Cause
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, lease, pod, snapshot


@pytest.mark.parametrize("runs", [False, True])
def test_a_busy_machine_restarts_no_leader_that_runs(*, runs: bool) -> None:
    owner = admitted(job())
    assert owner.spec is not None
    pods = tuple(pod(owner, index) for index in range(2))
    seen = snapshot(owner, pods=pods, lease=lease(owner))
    seen = dataclasses.replace(seen, leaders_running=frozenset({pods[0].uid} if runs else {"another"}))
    limit_s = owner.spec.health.heartbeat_timeout_seconds
    assert find_failure(seen, owner.spec, NOW_S + limit_s - 1) is None
    for after_s, restarts in ((limit_s, not runs), (limit_s * RUNNING_SILENCES, True)):
        failure = find_failure(seen, owner.spec, NOW_S + after_s)
        assert (failure is not None and failure.cause is Cause.LEADER_SILENT) == restarts
