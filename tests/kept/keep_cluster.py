"""Write the objects of a small cluster to keep, as the operator left them: jobs with full status, queues, a topology.

One job runs in its second attempt, one is elastic, one was preempted, one waits, one has succeeded, and one
has a status that can't be read.
"""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import KINDS, STATUS_SUBRESOURCE, ObjectRef
from tests.kept.leaders import Leaders
from tests.unit.operator.operator_scenes import DEVICE
from tests.unit.operator.operator_stage import Stage, node_manifest

OBJECTS = "cluster.json"
RACK = "example.com/rack"
NODES, DEVICES_EACH = 4, 2


def keep(folder: Path) -> None:
    """Play the story and write every object that is left."""
    stage = Stage()
    stage.run(lambda: _story(stage))
    objects = [record.manifest for kind in KINDS for record in stage.store.records(kind)]
    content = {"version": stage.store.version, "nowS": stage.clock.now_s(), "objects": objects}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / OBJECTS).write_text(json.dumps(content, indent=1, sort_keys=True) + "\n")


async def _story(stage: Stage) -> None:
    for at in range(NODES):
        node = node_manifest(f"n{at}", DEVICES_EACH)
        stage.store.create({**node, "metadata": {**node["metadata"], "labels": {RACK: f"r{at // 2}"}}})
    _queues(stage)
    leaders = Leaders(stage)
    renewing = asyncio.ensure_future(leaders.renew())
    trained = _job(stage, "trained", workers={"replicas": 2, "devices": 2}, topology={"required": "rack"})
    _job(stage, "done")
    await asyncio.sleep(40.0)
    leaders.done.add("done")
    await asyncio.sleep(20.0)
    _job(stage, "broken")
    _job(stage, "victim", queueName="spare")
    _job(stage, "elastic", queueName="spare", workers={"replicas": 1, "minReplicas": 1, "maxReplicas": 2})
    await asyncio.sleep(60.0)
    _fail_pod(stage, trained)
    await asyncio.sleep(60.0)
    _job(stage, "urgent", priority=100, workers={"replicas": 1, "devices": 2})
    await asyncio.sleep(60.0)
    _job(stage, "waiting", workers={"replicas": 4, "devices": 2})
    _make_unreadable(stage, "broken")
    await asyncio.sleep(60.0)
    renewing.cancel()
    await asyncio.gather(renewing, return_exceptions=True)


def _job(stage: Stage, name: str, **spec: Any) -> str:
    plain = {
        "queueName": "team",
        "training": {"steps": 10_000, "packsPerStep": 8},
        "workers": {"replicas": 1, "devices": 1},
        "failurePolicy": {"backoff": {"initialSeconds": 1, "maxSeconds": 5}},
    }
    return stage.add_job(name, **{**plain, **spec})


def _queues(stage: Stage) -> None:
    topology = {"levels": [{"name": "rack", "nodeLabel": RACK, "distance": 4}]}
    queues: dict[str, dict[str, Any]] = {
        "company": {"quotas": [{"resource": DEVICE, "nominal": 0}]},
        "team": {
            "parent": "company",
            "weight": 2,
            "quotas": [{"resource": DEVICE, "nominal": 8, "lendingLimit": 8}],
            "preemption": {"withinQueue": "LowerPriority", "reclaim": "Any", "maxPerJob": 2, "windowSeconds": 86400},
            "backfill": {"mode": "Conservative"},
        },
        "spare": {
            "parent": "company",
            "agingSeconds": 3600,
            "fairSharing": {"halfLifeSeconds": 604800},
            "quotas": [{"resource": DEVICE, "nominal": 0, "borrowingLimit": 8}],
        },
    }
    stage.store.create(_object(labels.KIND_TOPOLOGY, "default", topology))
    for name, spec in queues.items():
        stage.store.create(_object("TrainingQueue", name, spec))


def _object(kind: str, name: str, spec: dict[str, Any]) -> dict[str, Any]:
    return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": {"name": name}, "spec": spec}


def _fail_pod(stage: Stage, uid: str) -> None:
    pods = [record.manifest for record in stage.store.records("Pod")]
    failed = next(pod for pod in pods if pod["metadata"]["ownerReferences"][0]["uid"] == uid)
    ended = {"name": "trainer", "state": {"terminated": {"exitCode": 137, "reason": "OOMKilled"}}}
    status = {"phase": "Failed", "containerStatuses": [ended]}
    stage.store.change(ObjectRef.of(failed), {"status": status}, subresource=STATUS_SUBRESOURCE)


def _make_unreadable(stage: Stage, name: str) -> None:
    """Store a placement that no operator wrote: the job is quarantined, its pods stay."""
    attempt = stage.status(name)["attempt"]
    nodes = [{**entry, "parts": ["a", "b", "c"]} for entry in attempt["placement"]["nodes"]]
    placement = {**attempt["placement"], "nodes": nodes}
    job = ObjectRef(kind=labels.KIND_JOB, namespace="default", name=name)
    stage.store.change(job, {"status": {"attempt": {"placement": placement}}}, subresource=STATUS_SUBRESOURCE)
