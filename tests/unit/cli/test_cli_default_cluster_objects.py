"""A job that names queue and topology of a cluster finds both on one machine, and is admitted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.local_run.default_cluster_objects import cluster_objects, node_labels
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.labels import KIND_QUEUE, KIND_TOPOLOGY, RESOURCE_DEVICE
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest
from polyreme_local.kubelet.status import node
from polyreme_operator.cache.plan_book import planned
from polyreme_operator.scheduler import cluster_of, schedule
from polyreme_operator.types.parse import parse_job_view, parse_node
from polyreme_operator.types.parse_settings import parse_queue, parse_topology
from polyreme_planner.loading import load_object

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "quickstart.yaml"


def wanting(**changes: Any) -> TrainingJob:
    manifest = yaml.safe_load(SAMPLE.read_text())
    manifest["spec"] = {**manifest["spec"], **changes}
    return parse_job(manifest)


def stored(manifest: Manifest) -> Manifest:
    written = {"uid": f"uid-{manifest['kind']}", "resourceVersion": "1", "generation": 1}
    return {**manifest, "metadata": {**manifest["metadata"], **written}}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"queueName": "research"},
        {"topology": {"required": "rack"}},
        {"topology": {"preferred": "topology.kubernetes.io/zone", "sliceSize": 2, "sliceLevel": "rack"}},
        {"topology": {"required": "host", "exclusive": "block"}},
    ],
)
def test_what_a_job_names_is_there_for_it(changes: dict[str, Any]) -> None:
    job = wanting(**changes)
    for manifest in cluster_objects(job):
        load_object(manifest)
    objects = {manifest["kind"]: stored(manifest) for manifest in cluster_objects(job)}
    topology = parse_topology(objects[KIND_TOPOLOGY]) if KIND_TOPOLOGY in objects else None
    machine = node("local", devices=8, resource=RESOURCE_DEVICE, labels=node_labels(job, "local"), at=rfc3339(0.0))
    cluster = cluster_of(
        jobs=(planned(parse_job_view(stored(job.to_object()))),),
        nodes=(parse_node(machine),),
        queues=[parse_queue(objects[KIND_QUEUE])] if KIND_QUEUE in objects else [],
        levels=topology.levels if topology is not None else (),
    )
    batch = schedule(cluster, 0.0)
    assert [write.after.is_true("Admitted") for write in batch.writes] == [True], batch.pending


def test_a_job_that_names_nothing_needs_nothing() -> None:
    assert cluster_objects(wanting()) == []
    assert node_labels(wanting(), "local") == {}
