"""Every object that the operator creates for a job has the job as its controller."""

from polyreme_cluster.port import Manifest
from polyreme_operator.reconcile import worker_pods
from polyreme_operator.reconcile.worker_pods import PodDefaults, WorkerPods
from tests.unit.operator.operator_scenes import admitted, job


def owned_objects() -> list[Manifest]:
    owner = admitted(job())
    assert owner.spec is not None
    assert owner.attempt is not None
    pods = WorkerPods(owner, owner.spec, owner.attempt, defaults=PodDefaults(), mode="NodeName")
    return [
        worker_pods.service(owner),
        worker_pods.lease(owner, owner.spec),
        worker_pods.secret(owner),
        worker_pods.account(owner),
        worker_pods.role(owner),
        worker_pods.role_binding(owner, owner.spec),
        pods.manifest(index=0, node="n0"),
        pods.manifest(index=1, node="n1"),
    ]


def test_the_job_is_the_one_controller_of_its_objects_and_never_waits_for_their_deletion() -> None:
    for manifest in owned_objects():
        (reference,) = manifest["metadata"]["ownerReferences"]
        assert reference == {
            "apiVersion": "polyreme.dev/v1alpha1",
            "kind": "TrainingJob",
            "name": "j",
            "uid": "uid-j",
            "controller": True,
            "blockOwnerDeletion": False,
        }, manifest["kind"]


def test_pods_bear_the_annotations_of_their_template() -> None:
    given = {"metadata": {"annotations": {"example.com/team": "a"}, "labels": {"example.com/team": "b"}}}
    owner = admitted(job(workers={"replicas": 2, "devices": 1, "template": given}))
    assert owner.spec is not None
    assert owner.attempt is not None
    pods = WorkerPods(owner, owner.spec, owner.attempt, defaults=PodDefaults(), mode="NodeName")
    metadata = pods.manifest(index=1, node="n1")["metadata"]
    assert metadata["annotations"] == {"example.com/team": "a"}
    assert metadata["labels"]["example.com/team"] == "b"
