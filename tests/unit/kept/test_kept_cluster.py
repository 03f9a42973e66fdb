"""Today's operator continues with the objects that an older one left: what ran runs on, and what waited waits."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.schema import SCHEMAS
from polyreme_local.api_server.store import Store
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.snapshots import job_snapshot
from polyreme_planner.plan import Plan
from tests.kept.folders import VERSIONS, read_cluster
from tests.kept.leaders import Leaders
from tests.unit.operator.operator_stage import Stage

ADMITTED = {"trained", "elastic", "urgent", "broken"}
WAITING = {"victim", "waiting"}
QUARANTINED = {"broken"}
AWAY_S = 5.0
"""From the last write of the old operator to the start of the new one."""
WATCHED_S = 120.0

pytestmark = pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)


def restored(version: Path) -> Stage:
    """A stage with the kept objects, at the time at which they were kept."""
    kept, stage = read_cluster(version), Stage()
    stage.clock.step_wall(kept["nowS"] + AWAY_S - stage.clock.now_s())
    numbers = itertools.count()
    stage.store = Store(new_uid=lambda: f"new-{next(numbers):08x}", now_s=stage.clock.now_s, validators=SCHEMAS)
    stage.store.restore(kept["objects"], version=kept["version"])
    stage.cluster = EmbeddedCluster(stage.store)
    return stage


@contextlib.contextmanager
def playing(leaders: Leaders) -> Iterator[None]:
    renewing = asyncio.ensure_future(leaders.renew())
    try:
        yield
    finally:
        renewing.cancel()


def jobs_of(stage: Stage) -> dict[str, dict[str, Any]]:
    """Status of each job by its name."""
    return {record.name: dict(record.manifest["status"]) for record in stage.store.records(labels.KIND_JOB)}


def jobs_kept(version: Path) -> dict[str, dict[str, Any]]:
    """The same as it was kept."""
    jobs = (each for each in read_cluster(version)["objects"] if each["kind"] == labels.KIND_JOB)
    return {job["metadata"]["name"]: job["status"] for job in jobs}


def uids(stage: Stage, *kinds: str) -> set[str]:
    """UIDs of the objects of jobs; the installation's key is another one's."""
    found = (record for kind in kinds for record in stage.store.records(kind))
    return {record.uid for record in found if record.name != labels.INSTALLATION_KEY_NAME}


def conditions(status: dict[str, Any]) -> dict[str, str]:
    return {each["type"]: each["status"] for each in status["conditions"]}


def test_every_object_is_read(version: Path) -> None:
    kept, cache = read_cluster(version), ClusterCache()
    for manifest in kept["objects"]:
        cache.put(manifest, now_s=kept["nowS"])
    views = {view.name: view for view in cache.jobs.views.values()}
    assert {name for name, view in views.items() if view.unreadable or view.fault} == QUARANTINED
    assert all(view.spec is not None and not view.invalid for view in views.values())
    assert {name for name, view in views.items() if view.status.is_true("Admitted")} == ADMITTED
    assert set(cache.queues.views) == {"company", "team", "spare"}
    assert cache.topology.view is not None
    assert cache.topology.levels
    intended = [view.name for view in views.values() if cache.intents.is_intended(view.uid)]
    assert intended == ["urgent"]
    for name in ADMITTED:
        snapshot = job_snapshot(cache, views[name].uid, now_s=kept["nowS"])
        assert snapshot is not None
        assert snapshot.pods
        assert snapshot.lease is not None
        assert snapshot.lease.record is not None
        assert snapshot.lease.record.step > 0


def test_the_stored_plan_of_an_attempt_is_read(version: Path) -> None:
    for job, status in jobs_kept(version).items():
        if (attempt := status.get("attempt")) is not None:
            plan = Plan.from_json(attempt["plan"])
            assert (plan.hash, plan.replicas) == (attempt["planHash"], attempt["replicas"]), job


def test_the_command_of_stored_pods_runs_todays_launcher(version: Path) -> None:
    """A pod that was stored and not started runs its command under this version, as does a newer image."""
    pods = [each for each in read_cluster(version)["objects"] if each["kind"] == "Pod"]
    stored = {tuple(pod["spec"]["containers"][0]["command"]) for pod in pods}
    said = [
        subprocess.run([sys.executable, *command[1:]], capture_output=True, text=True, check=False)
        for command in (*stored, PodDefaults().command)
    ]
    assert {command[0] for command in stored} == {"python"}
    assert "POLYREME_" in said[-1].stderr
    assert {(ended.returncode, ended.stderr) for ended in said} == {(said[-1].returncode, said[-1].stderr)}


def test_the_operator_continues_what_runs_and_starts_nothing(version: Path) -> None:
    stage = restored(version)
    before, owned = jobs_kept(version), uids(stage, "Pod", "Service", "Lease", "Secret")

    async def story() -> None:
        with playing(Leaders(stage)):
            await asyncio.sleep(WATCHED_S)
        assert uids(stage, "Pod", "Service", "Lease", "Secret") == owned
        after = jobs_of(stage)
        for name, status in before.items():
            for field in ("attempt", "restarts", "restartRecords", "preemptions", "cancelledAdmissions", "arrival"):
                assert after[name].get(field) == status.get(field), f"{name}: {field}"
            assert conditions(after[name]) == conditions(status), name
        for name in ADMITTED - QUARANTINED:
            assert after[name]["step"] > before[name]["step"], name
        assert {name for name, status in after.items() if conditions(status).get("Admitted") == "True"} == ADMITTED
        assert {name for name, status in after.items() if conditions(status).get("Queued") == "True"} == WAITING
        assert {name for name, status in after.items() if conditions(status).get("Degraded")} == QUARANTINED

    stage.run(story)


def test_queues_keep_what_was_counted_and_admit_when_there_is_room(version: Path) -> None:
    stage = restored(version)
    before = {record.name: record.manifest["status"] for record in stage.store.records("TrainingQueue")}

    async def story() -> None:
        leaders = Leaders(stage)
        with playing(leaders):
            await asyncio.sleep(10.0)
            queues = {record.name: record.manifest["status"] for record in stage.store.records("TrainingQueue")}
            for name, status in queues.items():
                for field in ("admitted", "pending", "usage"):
                    assert status[field] == before[name][field], name
            leaders.done.add("urgent")
            await asyncio.sleep(60.0)
        victim = stage.status("victim")
        assert conditions(victim)["Admitted"] == "True"
        assert victim["attempt"]["number"] == jobs_kept(version)["victim"]["attempt"]["number"] + 1
        assert victim["accounting"]["effectiveMilliseconds"] >= 120_000

    stage.run(story)
