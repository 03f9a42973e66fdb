"""The status says by which priority a job waits and may be displaced, and whether its class is missing."""

import dataclasses
from typing import Any

import pytest

from polyreme_cluster.port import ObjectRef
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.reconcile import transition
from polyreme_operator.reconcile.job import reconcile
from polyreme_operator.reconcile.worker_pods import PodDefaults, WorkerPods
from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.priority import Priority, PriorityClassView, priority_of
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import JobSnapshot, Pending
from tests.unit.operator.operator_scenes import (
    NOW_S,
    admitted,
    decide,
    job,
    job_manifest,
    lease,
    node,
    pod,
    snapshot,
)

CLASSES = {"urgent": 1000, "base": 500, "low": 50}


def told(seen: JobSnapshot) -> int | None:
    decision = reconcile(seen, NOW_S, defaults=PodDefaults())
    (write,) = (action for action in decision.actions if isinstance(action, WriteStatus))
    return write.after.priority


def test_a_waiting_job_says_its_priority() -> None:
    assert told(snapshot(dataclasses.replace(job("waits"), priority=1000))) == 1000


def test_an_admitted_job_says_its_priority_at_once_and_when_it_changes() -> None:
    waits = dataclasses.replace(job("runs"), priority=7)
    assert transition.admit(waits, ["n0", "n0"], NOW_S).priority == 7
    runs = dataclasses.replace(admitted(job("runs")), priority=8)
    pods = tuple(pod(runs, index) for index in range(2))
    assert told(snapshot(runs, pods=pods, nodes={"n0": node()}, lease=lease(runs))) == 8


def test_a_class_that_is_missing_is_said_and_no_more_once_it_is_there() -> None:
    named = job("named", priorityClassName="urgent", priority=7)
    assert (named.priority, named.class_missing) == (7, True)
    seen = dataclasses.replace(snapshot(named), pending=Pending(Reason.WAITING_FOR_CAPACITY, "needs 2 devices"))
    (write,) = (action for action in decide(seen).actions if isinstance(action, WriteStatus))
    said = write.after.condition("PriorityClassMissing")
    assert said is not None
    assert (said.status, said.reason) == ("True", "NotFound")
    assert said.message == (
        "there is no PriorityClass urgent; spec.priority 7 applies until it exists; "
        "create it or change spec.priorityClassName"
    )
    there = dataclasses.replace(named, status=write.after, class_missing=False, priority=1000)
    (write,) = (action for action in decide(snapshot(there)).actions if isinstance(action, WriteStatus))
    assert write.after.condition("PriorityClassMissing") is None
    assert write.after.priority == 1000


def test_a_running_jobs_missing_class_is_reported_too() -> None:
    runs = dataclasses.replace(admitted(job("runs", priorityClassName="urgent")), class_missing=True)
    pods = tuple(pod(runs, index) for index in range(2))
    seen = snapshot(runs, pods=pods, nodes={"n0": node()}, lease=lease(runs))
    (write,) = (action for action in decide(seen).actions if isinstance(action, WriteStatus))
    assert write.after.is_true("PriorityClassMissing")
    assert not job("plain").class_missing


def test_the_model_notes_that_a_class_comes_even_where_its_value_is_the_jobs_own() -> None:
    model = ClusterCache()
    manifest = job_manifest("named", priorityClassName="urgent", priority=7)
    model.put(manifest, now_s=NOW_S)
    uid = manifest["metadata"]["uid"]
    found = model.job(uid)
    assert found is not None
    assert found.class_missing
    urgent = {"kind": "PriorityClass", "metadata": {"name": "urgent", "resourceVersion": "9"}, "value": 7}
    assert uid in model.put(urgent, now_s=NOW_S).jobs
    found = model.job(uid)
    assert found is not None
    assert (found.class_missing, found.priority) == (False, 7)
    assert uid in model.remove(ObjectRef(kind="PriorityClass", name="urgent"), version=10).jobs


@pytest.mark.parametrize(
    ("spec", "value", "missing"),
    [
        ({}, 50, False),
        ({"priority": 7}, 7, False),
        ({"priorityClassName": "urgent"}, 1000, False),
        ({"priorityClassName": "gone", "priority": 7}, 7, True),
        ({"priorityClassName": "gone"}, 0, True),
    ],
)
def test_the_clusters_default_class_counts_for_jobs_that_name_none(
    spec: dict[str, Any], value: int, missing: bool
) -> None:
    """As Kubernetes gives it to their pods: of two defaults the lower one."""
    classes = {name: PriorityClassView(each, name != "urgent") for name, each in CLASSES.items()}
    asked = job("j", **spec).spec
    assert priority_of(asked, classes) == Priority(value, class_missing=missing)
    assert priority_of(asked, {}).value == spec.get("priority", 0)


def test_pods_get_the_class_of_their_job_unless_it_is_missing_or_their_template_names_another() -> None:
    named = dataclasses.replace(job("j", priorityClassName="urgent"), class_missing=False)
    own = {"replicas": 2, "template": {"spec": {"priorityClassName": "other"}}}
    template = dataclasses.replace(job("j", priorityClassName="urgent", workers=own), class_missing=False)
    cases = ((named, "urgent"), (dataclasses.replace(named, class_missing=True), None), (template, "other"))
    for waits, expected in (*cases, (job("j"), None)):
        runs = admitted(waits)
        assert runs.spec is not None
        assert runs.attempt is not None
        pods = WorkerPods(runs, runs.spec, runs.attempt, defaults=PodDefaults(), mode="NodeAffinity")
        assert pods.manifest(index=0, node="n0")["spec"].get("priorityClassName") == expected
