"""Record of a run: written once, without what may be secret, and never a reason for an attempt to fail."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from polyreme_api.environment import PodEnvironment
from polyreme_api.job import parse_job
from polyreme_api.run_record import RunRecord
from polyreme_datahub.objects import open_store
from polyreme_launcher.run_record import write_run_record
from polyreme_planner.plan import plan_for
from tests.unit.launcher.launch_scenes import pod_environment

SECRET = "do-not-store"
JOB = {
    "apiVersion": "polyreme.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "job", "namespace": "team"},
    "spec": {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sequenceTokens": 160, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
        "training": {"steps": 4, "packsPerStep": 2, "seed": 3},
        "workers": {
            "devices": 2,
            "template": {"spec": {"containers": [{"name": "worker", "env": [{"name": "K", "value": SECRET}]}]}},
        },
    },
}

PLAN = plan_for(parse_job(JOB).spec).to_json()


@pytest.fixture
def pod(tmp_path: Path) -> PodEnvironment:
    return pod_environment(tmp_path, replicas=1, devices=2)


def records(pod: PodEnvironment) -> list[RunRecord]:
    store = open_store(pod.checkpoint_url)
    return [RunRecord.model_validate_json(store.get(info.key)) for info in store.list("runs/")]


def test_what_was_trained_is_recorded_once(pod: PodEnvironment) -> None:
    write_run_record(json.dumps(JOB), PLAN, pod=pod, objects_url=None, now_s=1.0)
    changed = json.loads(json.dumps(JOB))
    changed["spec"]["training"]["seed"] = 4
    write_run_record(json.dumps(changed), PLAN, pod=pod, objects_url=None, now_s=2.0)
    write_run_record(
        json.dumps(changed), PLAN, pod=dataclasses.replace(pod, job_uid="u-2"), objects_url=None, now_s=3.0
    )
    first, second = records(pod)
    assert (first.uid, first.namespace, first.name, first.seed, first.written_at_s) == ("u-1", "team", "job", 3, 1.0)
    assert (first.layout, first.cluster) == ("dp2", "https://10.0.0.1:6443")
    assert first.spec["training"]["optimizer"]["learningRate"]
    assert SECRET not in first.model_dump_json()
    assert second.seed == 4


def test_the_embedded_cluster_has_no_name(pod: PodEnvironment) -> None:
    local = dataclasses.replace(pod, api_url="http://127.0.0.1:4000")
    write_run_record(json.dumps(JOB), PLAN, pod=local, objects_url=None, now_s=1.0)
    (record,) = records(pod)
    assert record.cluster == ""


def test_a_record_that_cannot_be_written_is_a_line(
    pod: PodEnvironment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "root").write_text("a file")
    write_run_record(json.dumps(JOB), PLAN, pod=pod, objects_url=None, now_s=1.0)
    assert "run record is not written" in capsys.readouterr().err
