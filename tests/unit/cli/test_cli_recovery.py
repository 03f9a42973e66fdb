"""A run whose journal is damaged or gone keeps its job's UID, and never uses the number of an attempt again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.local_run.recovery import newest_attempt, rebuilt
from polyreme_api.job import TrainingJob, parse_job
from polyreme_datahub.objects import open_store

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "quickstart.yaml"


def job(**status: Any) -> TrainingJob:
    manifest: dict[str, Any] = yaml.safe_load(SAMPLE.read_text())
    if status:
        manifest["metadata"]["uid"] = "known"
        manifest["status"] = status
    return parse_job(manifest)


def attempt(number: int) -> dict[str, Any]:
    return {"number": number, "planHash": "p", "replicas": 2, "devices": 2}


def again(manifests: list[dict[str, Any]], newest: int) -> TrainingJob:
    (manifest,) = rebuilt(manifests, job(), uid="given", attempt=newest, node="local", now_s=0.0)
    assert manifest["metadata"]["resourceVersion"]
    return parse_job(manifest)


def test_without_a_journal_the_job_is_stopped_after_its_newest_attempt() -> None:
    found = again([], 3)
    assert found.metadata.uid == "given"
    assert found.status.attempt is not None
    assert (found.status.attempt.number, found.status.attempt.desired) == (3, "Stop")
    assert not found.status.is_true("Admitted")


@pytest.mark.parametrize(("known", "newest", "number"), [(2, 4, 4), (5, 4, 5)])
def test_the_newer_of_journal_and_checkpoints_counts(known: int, newest: int, number: int) -> None:
    condition = {"type": "Admitted", "status": "True", "reason": "Admitted"}
    kept = job(attempt=attempt(known), restarts=7, conditions=[condition]).to_object()
    pod = {"kind": "Pod", "metadata": {"name": "p"}}
    found = again([pod, kept], newest)
    assert found.metadata.uid == "known"
    assert found.status.attempt is not None
    assert found.status.attempt.number == number
    assert found.status.restarts == 7
    assert not found.status.is_true("Admitted")


def test_a_job_that_was_finished_stays_so() -> None:
    condition = {"type": "Succeeded", "status": "True", "reason": "Completed"}
    kept = job(attempt=attempt(2), conditions=[condition]).to_object()
    assert again([kept], 2).status.finished


def test_every_trace_of_an_attempt_in_a_checkpoint_root_counts(tmp_path: Path) -> None:
    store = open_store(tmp_path.as_uri())
    assert newest_attempt(store) == 0
    for key, number in (
        ("attempts/000001.json", 1),
        ("steps/a000002.jsonl", 2),
        ("a000003-s00000050/COMMIT.json", 3),
        ("attempts/000004.claim", 4),
    ):
        store.put(key, b"x")
        assert newest_attempt(store) == number
