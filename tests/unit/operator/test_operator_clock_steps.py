"""Wall clocks are stepped, and differ between machines; durations are measured by time that really passes."""

import asyncio
import dataclasses
import random
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_api.clock import MonotonicWallClock
from polyreme_api.job import TrainingJobStatus
from polyreme_api.job.status import RestartRecord
from polyreme_api.times import parse_rfc3339, rfc3339
from polyreme_cluster.port import Manifest
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.controller import run_operator
from polyreme_operator.reconcile import stopping, transition
from polyreme_operator.reconcile.failure_policy import SKEW_S, Restart, judge
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.observe import UNSCHEDULABLE_S, find_failure
from polyreme_operator.reconcile.status_builder import StatusBuilder
from polyreme_operator.reconcile.stopping import STOP_GRACE_S
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.snapshots import job_snapshot
from polyreme_operator.types.actions import DeleteJob, DeletePod, WriteStatus
from polyreme_operator.types.queues import QueueView
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import JobSnapshot
from polyreme_operator.types.views import JobView
from polyreme_simulator.event_loop import SimClock, VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.world import World
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, job_manifest, lease, node, pod, snapshot
from tests.unit.operator.test_operator_identity import UID, pod_manifest

HOUR_S = 3600.0
JOBS = 3
SOON_S = 20.0
STEPS = 10_000


def submit(world: World, name: str) -> None:
    uid = world.store.create(manifest(name))["metadata"]["uid"]
    world.steps[uid] = STEPS
    world.training.checkpoint_every[uid] = 20


def manifest(name: str) -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": STEPS, "packsPerStep": 2},
            "workers": {"replicas": 2},
        },
    }


def told(step_s: float) -> list[dict[str, Any]]:
    """Run some jobs, step the clock of every machine, continue; return the statuses of the jobs."""
    loop = VirtualLoop()
    world = World(loop, random.Random(1), Facts())
    world.faulty = False
    world.add_node("n0", 2 * JOBS + 2)

    async def run() -> None:
        task = asyncio.ensure_future(
            run_operator(EmbeddedCluster(world.store), world.clock, rng=random.Random(1), entropy=bytes)
        )
        for at in range(JOBS):
            submit(world, f"healthy{at}")
        await asyncio.sleep(SOON_S)
        world.clock.step_wall(step_s)
        submit(world, "later")
        await asyncio.sleep(SOON_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(run())
    loop.close()
    return [record.manifest["status"] for record in world.store.records("TrainingJob")]


def reasons(status: dict[str, Any]) -> dict[str, str]:
    return {each["type"]: f"{each['status']} {each['reason']}" for each in status["conditions"]}


@pytest.mark.parametrize("step_s", [-HOUR_S, HOUR_S, 45.0, -45.0])
def test_a_step_neither_stops_scheduling_nor_restarts_a_healthy_job(step_s: float) -> None:
    statuses = told(step_s)
    assert [reasons(status).get("Running") for status in statuses] == ["True Training"] * (JOBS + 1)
    assert [status.get("restarts", 0) for status in statuses] == [0] * (JOBS + 1)


def test_time_that_follows_no_step_is_the_machines_until_the_first() -> None:
    loop = VirtualLoop()
    machine = SimClock(loop)
    clock = MonotonicWallClock(machine)
    assert clock.now_s() == machine.now_s()
    machine.step_wall(-HOUR_S)
    loop.run_until_complete(clock.sleep(5.0))
    loop.close()
    assert (clock.now_s() - machine.now_s(), clock.stepped_s()) == (HOUR_S, -HOUR_S)
    assert clock.steady_s() == machine.steady_s() == 5.0


# ------------------------------------------------------------------------------------ records of other machines' clocks


def put(model: ClusterCache, view: JobView, version: int, at_s: float) -> JobView:
    model.put(job_manifest(status=view.status, version=version), now_s=at_s)
    found = model.job(UID)
    assert found is not None
    return found


@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
def test_a_new_leader_gives_a_start_its_whole_time_by_its_own_clock(skew_s: float) -> None:
    model = ClusterCache()
    view = put(model, admitted(job(), at_s=NOW_S + skew_s), 1, NOW_S)
    pods = tuple(pod(view, index) for index in range(2))
    assert view.spec is not None
    limit_s = view.spec.health.start_timeout_seconds

    def fails(after_s: float) -> bool:
        heard = lease(view, seen_s=NOW_S + after_s, released=False, joined=0)
        assert view.spec is not None
        return find_failure(snapshot(view, pods=pods, lease=heard), view.spec, NOW_S + after_s) is not None

    assert not fails(limit_s - 1)
    assert fails(limit_s)
    # What changes beside the attempt does not begin its time again.
    view = put(model, dataclasses.replace(view, status=view.status.model_copy(update={"step": 1})), 2, NOW_S + 60)
    assert fails(limit_s)


@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
def test_a_new_leader_gives_a_victim_its_whole_grace_by_its_own_clock(skew_s: float) -> None:
    model = ClusterCache()
    view = put(model, admitted(job(), at_s=NOW_S + skew_s - 100), 1, NOW_S - 50)
    asked = transition.stop_for_preemption(view, job("first"), reclaim=False, now_s=NOW_S + skew_s)
    view = put(model, dataclasses.replace(view, status=asked), 2, NOW_S)
    assert view.spec is not None
    grace_s = view.spec.checkpoint.preemption_grace_seconds
    seen = snapshot(view, pods=tuple(pod(view, index) for index in range(2)), lease=lease(view))
    assert not stopping.has_stopped(seen, NOW_S + grace_s - 1)
    assert stopping.has_stopped(seen, NOW_S + grace_s)


@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
@pytest.mark.parametrize("watched", [True, False])
def test_a_finished_job_is_cleared_up_by_our_own_clock(skew_s: float, *, watched: bool) -> None:
    ttl_s = 600
    model, running = ClusterCache(), admitted(job(), at_s=NOW_S + skew_s - 100)
    if watched:
        model.put(job_manifest(status=running.status, ttlSecondsAfterFinished=ttl_s), now_s=NOW_S - 50)
    after = StatusBuilder(running, NOW_S + skew_s)
    done = after.finish(succeeded=True, reason=Reason.COMPLETED, message="").build()
    model.put(job_manifest(status=done, ttlSecondsAfterFinished=ttl_s, version=2), now_s=NOW_S)
    # What changes later does not begin its time again.
    done = done.model_copy(update={"step": 1})
    model.put(job_manifest(status=done, ttlSecondsAfterFinished=ttl_s, version=3), now_s=NOW_S + 5)
    view = model.job(UID)
    assert view is not None

    def does(after_s: float) -> set[type[object]]:
        decision = reconcile(snapshot(view, pods=(pod(view, 1),)), NOW_S + after_s, defaults=PodDefaults())
        return {type(action) for action in decision.actions}

    if skew_s < 0 and not watched:
        # Nothing shows that the clock was slow: the record says that all is over.
        assert does(0) == {DeletePod, DeleteJob}
    else:
        assert does(STOP_GRACE_S - 1) == set()
        assert does(STOP_GRACE_S) == does(ttl_s - 1) == {DeletePod}
        assert does(ttl_s) == {DeletePod, DeleteJob}


@pytest.mark.parametrize("skew_s", [-HOUR_S, HOUR_S])
def test_the_active_deadline_is_measured_by_our_own_clock(skew_s: float) -> None:
    limit_s = 600
    model = ClusterCache()
    model.put(job_manifest(activeDeadlineSeconds=limit_s), now_s=NOW_S - 50)
    begun = admitted(job(activeDeadlineSeconds=limit_s), at_s=NOW_S + skew_s).status
    model.put(job_manifest(status=begun, activeDeadlineSeconds=limit_s, version=2), now_s=NOW_S)
    view = model.job(UID)
    assert view is not None
    pods = tuple(pod(view, index) for index in range(2))

    def fails(after_s: float) -> bool:
        seen = snapshot(view, pods=pods, lease=lease(view, seen_s=NOW_S + after_s))
        writes = reconcile(seen, NOW_S + after_s, defaults=PodDefaults()).actions
        return any(isinstance(write, WriteStatus) and write.after.finished for write in writes)

    assert not fails(limit_s - 1)
    assert fails(limit_s)


def test_a_new_leader_protects_a_running_job_no_longer_than_its_minimum_runtime() -> None:
    queue = QueueView(name="default", min_runtime_s=600.0)

    def preempts(after_s: float, *, skew_s: float) -> bool:
        model = ClusterCache()
        view = put(model, admitted(job(), at_s=NOW_S + skew_s), 1, NOW_S)
        pods = tuple(pod(view, index) for index in range(2))
        jobs = (view, job("urgent", priority=5))
        cluster = cluster_of(jobs=jobs, nodes=(node(devices=2),), pods=pods, queues=(queue,), leases=(lease(view),))
        return any(write.uid == UID for write in schedule(cluster, NOW_S + after_s).writes)

    for skew_s in (0.0, HOUR_S):
        assert not preempts(599, skew_s=skew_s)
        assert preempts(600, skew_s=skew_s)


def test_an_admission_waits_for_no_retry_that_a_fast_clock_wrote() -> None:
    record = RestartRecord(attempt=1, at=rfc3339(NOW_S), cause="CreateRefused", scope="RestartGang")

    def begins(retry_s: float) -> bool:
        view = dataclasses.replace(job(), status=TrainingJobStatus(retry_at=rfc3339(retry_s), restart_records=[record]))
        return bool(schedule(cluster_of(jobs=(view,), nodes=(node(),)), NOW_S).writes)

    assert [begins(NOW_S + after_s) for after_s in (0.0, 5.0, HOUR_S)] == [True, False, True]


def test_a_wait_that_a_fast_clock_wrote_is_no_longer_than_any_may_be() -> None:
    failed = admitted(job())
    record: dict[str, Any] = {"exits": [{"rank": 1, "code": 1}]}
    assert failed.spec is not None
    longest_s = failed.spec.failure_policy.backoff.max_seconds

    def due_s(retry_s: float) -> float:
        earlier = RestartRecord(attempt=0, at=rfc3339(NOW_S), cause="RankExited", scope="RestartPod")
        update = {"retry_at": rfc3339(retry_s), "restart_records": [earlier]}
        view = dataclasses.replace(failed, status=failed.status.model_copy(update=update))
        pods = tuple(pod(view, index) for index in range(2))
        assert view.spec is not None
        verdict = judge(snapshot(view, pods=pods, lease=lease(view, **record)), view.spec, NOW_S)
        assert isinstance(verdict, Restart)
        return verdict.due_s

    assert due_s(NOW_S + longest_s) == NOW_S + longest_s
    assert due_s(NOW_S + longest_s + SKEW_S + HOUR_S) == NOW_S


def test_what_happened_to_a_pod_is_measured_from_when_it_was_seen() -> None:
    model = ClusterCache()
    model.put(job_manifest(status=admitted(job()).status), now_s=NOW_S)
    refused = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable"}
    for version, at_s in ((2, NOW_S), (3, NOW_S + 5)):
        made = pod_manifest(version=version, deletionTimestamp=rfc3339(NOW_S - HOUR_S), deletionGracePeriodSeconds=30)
        made["status"] = {"phase": "Pending", "conditions": [{**refused, "lastTransitionTime": rfc3339(0.0)}]}
        made["metadata"]["annotations"] = {"seen": str(version)}
        model.put(made, now_s=at_s)
    found: JobSnapshot | None = job_snapshot(model, UID, now_s=NOW_S + 5)
    assert found is not None
    assert (found.pods[0].unschedulable_since_s, found.pods[0].ends_by_s) == (NOW_S, NOW_S + 30)
    assert UNSCHEDULABLE_S > 5


def test_records_are_written_in_wall_time() -> None:
    (first, *_) = told(0.0)
    started_s = parse_rfc3339(first["attempt"]["startedAt"])
    assert 0.0 <= started_s - 1_700_000_000.0 < SOON_S
