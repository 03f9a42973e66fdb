"""What people see of our kinds: samples, kubectl get, explain, scale; and a status as large as the operator writes."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from kubernetes import client

from polyreme_api.crd.definitions import DEFINITIONS
from polyreme_api.fields import Condition
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import AttemptStatus, Preemption, PreemptionRecord, TrainingJobStatus
from polyreme_api.queue import TrainingQueueStatus
from polyreme_api.topology import ClusterTopologyStatus
from tests.cluster.kube import ROOT, api_client, kubectl, new_namespace
from tests.unit.api.jobs import job_with

GROUP, VERSION = "polyreme.dev", "v1alpha1"
AT = "2026-11-21T08:00:00Z"
SAMPLES = sorted((ROOT / "manifests/samples").glob("*.yaml"))


@pytest.fixture(scope="module")
def objects(kubeconfig: str) -> Iterator[Any]:
    with api_client(kubeconfig) as api:
        yield client.CustomObjectsApi(api)


@pytest.fixture(scope="module")
def namespace(kubeconfig: str) -> Iterator[str]:
    with api_client(kubeconfig) as api, new_namespace(api) as name:
        yield name


@pytest.fixture(scope="module")
def job(objects: Any, namespace: str) -> str:
    """Name of a job whose status says much."""
    manifest = job_with(
        {
            "metadata.name": "shown",
            "spec.queueName": "research",
            "spec.topology": {"required": "rack"},
            "spec.workers": {"replicas": 12, "maxReplicas": 12},
            "spec.training.packsPerStep": 24,
        }
    )
    objects.create_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", manifest)
    status = TrainingJobStatus(
        attempt=AttemptStatus(number=3, plan_hash="0123", replicas=12, devices=1, placement=Placement.of(["n"] * 12)),
        conditions=[
            Condition(type="Queued", status="False", reason="Admitted", last_transition_time=AT),
            Condition(type="Running", status="True", reason="Training", last_transition_time=AT),
        ],
        ready_replicas=12,
        replicas=12,
        selector="polyreme.dev/job-uid=x",
        step=420,
        priority=7,
        layout="dp12",
        preemptions=[PreemptionRecord(by="u", at=AT)],
        preemption_count=1,
        preemption=Preemption(by="u", by_name="team/big", requested_at=AT, deadline=AT, reclaim=True),
    )
    write_status(objects, "trainingjobs", "shown", status.model_dump(by_alias=True, exclude_none=True), namespace)
    return "shown"


def write_status(objects: Any, plural: str, name: str, status: dict[str, Any], namespace: str = "") -> Any:
    options = {"field_validation": "Strict"}
    body = {"status": status}
    if namespace:
        return objects.patch_namespaced_custom_object_status(GROUP, VERSION, namespace, plural, name, body, **options)
    return objects.patch_cluster_custom_object_status(GROUP, VERSION, plural, name, body, **options)


def table(text: str) -> dict[str, str]:
    """Read the one row of what kubectl prints, by heading; cells stand under their headings."""
    head, row = text.rstrip("\n").split("\n")
    starts = [at for at in range(len(head)) if head[at] != " " and (at == 0 or head[at - 1] == " ")]
    spans = zip(starts, [*starts[1:], None], strict=True)
    return {head[start:end].strip(): row[start:end].strip() for start, end in spans}


@pytest.mark.parametrize("path", SAMPLES, ids=lambda path: path.stem)
def test_the_server_accepts_every_sample(kubeconfig: str, namespace: str, path: Path) -> None:
    done = kubectl(kubeconfig, "apply", "--dry-run=server", "--validate=strict", "-n", namespace, "-f", str(path))
    assert done.count("(server dry run)") == len(list(yaml.safe_load_all(path.read_text())))


def test_the_samples_show_every_kind_that_people_write() -> None:
    shown = {document["kind"] for path in SAMPLES for document in yaml.safe_load_all(path.read_text())}
    assert shown == {definition.kind for definition in DEFINITIONS} - {"NodeIncident"}


def test_a_job_is_read_off_one_line(kubeconfig: str, namespace: str, job: str) -> None:
    shown = table(kubectl(kubeconfig, "get", "tj", job, "-n", namespace))
    assert shown.pop("AGE")
    assert shown == {
        "NAME": "shown", "QUEUE": "research", "READY": "12/12", "ATTEMPT": "3", "STEP": "420", "REASON": "Training",
    }  # fmt: skip


def test_the_wide_line_adds_priority_and_topology(kubeconfig: str, namespace: str, job: str) -> None:
    shown = table(kubectl(kubeconfig, "get", "tj", job, "-n", namespace, "-o", "wide"))
    wanted = {"PRIORITY": "7", "TOPOLOGY": "rack", "LAYOUT": "dp12", "WORKERS": "12", "PREEMPTIONS": "1"}
    assert wanted.items() <= shown.items()


def test_a_queue_and_a_topology_are_read_off_one_line(kubeconfig: str, objects: Any) -> None:
    ready = [Condition(type="Ready", status="False", reason="Cycle", last_transition_time=AT)]
    made: dict[str, tuple[dict[str, Any], Any]] = {
        "trainingqueues": ({"parent": "all"}, TrainingQueueStatus(pending=5, admitted=2, conditions=ready)),
        "clustertopologies": (
            {"levels": [{"name": "zone", "nodeLabel": "z"}]},
            ClusterTopologyStatus(nodes=7, unlabelled=1, conditions=ready),
        ),
    }
    kinds = {definition.plural: definition for definition in DEFINITIONS}
    shown = {}
    for plural, (spec, status) in made.items():
        manifest = {
            "apiVersion": f"{GROUP}/{VERSION}", "kind": kinds[plural].kind, "metadata": {"name": "shown"}, "spec": spec
        }  # fmt: skip
        objects.create_cluster_custom_object(GROUP, VERSION, plural, manifest)
        try:
            write_status(objects, plural, "shown", status.model_dump(by_alias=True))
            shown[plural] = table(kubectl(kubeconfig, "get", kinds[plural].short_name, "shown"))
        finally:
            objects.delete_cluster_custom_object(GROUP, VERSION, plural, "shown")
    queue = {"PARENT": "all", "PENDING": "5", "ADMITTED": "2", "READY": "False", "REASON": "Cycle"}
    topology = {"TOP": "zone", "NODES": "7", "UNLABELLED": "1", "READY": "False", "REASON": "Cycle"}
    assert queue.items() <= shown["trainingqueues"].items()
    assert topology.items() <= shown["clustertopologies"].items()


def test_kubectl_get_all_and_training_show_jobs(kubeconfig: str, namespace: str, job: str) -> None:
    for category in ("all", "training"):
        assert f"trainingjob.polyreme.dev/{job}" in kubectl(kubeconfig, "get", category, "-n", namespace)


def test_explain_teaches(kubeconfig: str) -> None:
    said = " ".join(kubectl(kubeconfig, "explain", "tj.spec.topology").split())
    assert "A level is named as in the ClusterTopology `default`" in said
    assert "Level, such as `rack`: one domain of this level must hold the whole gang" in said
    said = " ".join(kubectl(kubeconfig, "explain", "tq.spec.quotas.borrowingLimit").split())
    assert "Largest amount that it may borrow from its cohort" in said
    said = " ".join(kubectl(kubeconfig, "explain", "ct.spec.levels.nodeLabel").split())
    assert "Label of the nodes whose value names their domain." in said


def test_a_job_is_scaled_within_its_bounds(kubeconfig: str, namespace: str, job: str) -> None:
    assert "scaled" in kubectl(kubeconfig, "scale", f"tj/{job}", "--replicas=8", "-n", namespace)
    replicas = kubectl(kubeconfig, "get", "tj", job, "-n", namespace, "-o", "jsonpath={.spec.workers.replicas}")
    assert replicas == "8"
    with pytest.raises(AssertionError, match="replicas 13 is above maxReplicas 12"):
        kubectl(kubeconfig, "scale", f"tj/{job}", "--replicas=13", "-n", namespace)
    assert "scaled" in kubectl(kubeconfig, "scale", f"tj/{job}", "--replicas=12", "-n", namespace)


def test_the_scale_subresource_says_how_many_there_are(objects: Any, namespace: str, job: str) -> None:
    scale = objects.get_namespaced_custom_object_scale(GROUP, VERSION, namespace, "trainingjobs", job)
    assert scale["status"] == {"replicas": 12, "selector": "polyreme.dev/job-uid=x"}


def test_the_status_of_a_gang_on_15000_nodes_is_kept_whole(objects: Any, namespace: str) -> None:
    nodes = [f"gpu-rack{at // 8:02d}-node{at % 8:02d}.cluster.local" for at in range(15_000)]
    manifest = job_with({"metadata.name": "large", "spec.workers": {"replicas": 15_000}})
    objects.create_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", manifest)
    placed = AttemptStatus(number=1, plan_hash="0", replicas=15_000, devices=1, placement=Placement.of(nodes))
    status = TrainingJobStatus(attempt=placed)
    write_status(objects, "trainingjobs", "large", status.model_dump(by_alias=True, exclude_none=True), namespace)
    kept = objects.get_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", "large")
    attempt = TrainingJobStatus.model_validate(kept["status"]).attempt
    assert attempt is not None
    assert attempt.placement.node_by_index() == nodes


def test_a_status_of_a_queue_keeps_the_places_of_a_hundred(objects: Any) -> None:
    manifest = {"apiVersion": f"{GROUP}/{VERSION}", "kind": "TrainingQueue", "metadata": {"name": "long"}}
    objects.create_cluster_custom_object(GROUP, VERSION, "trainingqueues", manifest)
    try:
        head = [
            {"position": at, "namespace": "n", "name": f"j{at}", "priority": -at, "reason": "WaitingForCapacity"}
            for at in range(1, 101)
        ]
        status = TrainingQueueStatus.model_validate(
            {
                "head": head, "pending": 15_000, "decayedAt": AT,
                "usage": [{"resource": "nvidia.com/gpu", "used": 8, "borrowed": 4}],
                "decayed": [{"resource": "nvidia.com/gpu", "seconds": "12.5"}],
            }
        )  # fmt: skip
        kept = write_status(objects, "trainingqueues", "long", status.model_dump(by_alias=True))
        assert TrainingQueueStatus.model_validate(kept["status"]) == status
    finally:
        objects.delete_cluster_custom_object(GROUP, VERSION, "trainingqueues", "long")
