"""The cached state of an object never goes back to an older resource version."""

from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef, WatchEvent, WatchEventType
from polyreme_operator.cluster_cache import ClusterCache
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, job_manifest

JOB = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="j")


def node(version: int, devices: int = 4) -> dict[str, Any]:
    return {
        "kind": "Node",
        "metadata": {"name": "n0", "resourceVersion": str(version)},
        "status": {"allocatable": {DEVICE: str(devices)}, "conditions": []},
    }


def deleted(manifest: dict[str, Any], version: int) -> WatchEvent:
    metadata = {**manifest["metadata"], "resourceVersion": str(version)}
    return WatchEvent(type=WatchEventType.DELETED, object={**manifest, "metadata": metadata})


def model_with(*manifests: dict[str, Any]) -> ClusterCache:
    model = ClusterCache()
    for manifest in manifests:
        model.put(manifest, now_s=NOW_S)
    return model


def test_a_delete_that_comes_late_removes_no_newer_object() -> None:
    model = model_with(job_manifest(version=5), node(5))
    assert not model.apply(deleted(job_manifest(), 4), now_s=NOW_S).jobs
    assert not model.apply(deleted(node(1), 4), now_s=NOW_S).capacity
    assert model.job("uid-j") is not None
    assert "n0" in model.nodes.views
    assert model.apply(deleted(job_manifest(), 6), now_s=NOW_S).jobs == {"uid-j"}
    assert model.job("uid-j") is None


def test_an_event_that_comes_after_a_newer_delete_brings_nothing_back() -> None:
    model = model_with(job_manifest(version=5))
    model.apply(deleted(job_manifest(), 6), now_s=NOW_S)
    assert not model.put(job_manifest(version=5), now_s=NOW_S).jobs
    assert not model.put(job_manifest(version=6), now_s=NOW_S).jobs
    assert model.job("uid-j") is None
    assert model.put(job_manifest(version=7), now_s=NOW_S).jobs == {"uid-j"}


def test_a_list_forgets_what_it_lacks_and_nothing_that_is_newer() -> None:
    model = model_with(job_manifest(version=5))
    assert not model.forget_unlisted(labels.KIND_JOB, set(), version=4).jobs
    assert model.job("uid-j") is not None
    assert model.forget_unlisted(labels.KIND_JOB, set(), version=5).jobs == {"uid-j"}
    assert model.job("uid-j") is None


def test_a_list_keeps_what_it_names_at_any_version() -> None:
    model = model_with(job_manifest(version=5), node(5))
    assert not model.forget_unlisted(labels.KIND_JOB, {JOB}, version=9).jobs
    assert model.job("uid-j") is not None
    assert "n0" in model.nodes.views, "a list of jobs says nothing about nodes"


def test_a_list_that_is_older_than_a_deletion_does_not_forget_the_deletion() -> None:
    model = model_with(job_manifest(version=5))
    model.apply(deleted(job_manifest(), 6), now_s=NOW_S)
    model.forget_unlisted(labels.KIND_JOB, set(), version=5)
    model.put(job_manifest(version=5), now_s=NOW_S)
    assert model.job("uid-j") is None
