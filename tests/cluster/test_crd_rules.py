"""What the API server itself refuses, without our operator: one sentence with field, value and rule."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client import ApiException

from polyreme_api.crd.definitions import DEFINITIONS
from polyreme_api.crd.rules import OBJECT_RULES, RULES
from tests.cluster.kube import api_client, new_namespace
from tests.unit.api.jobs import DROP, job_with

GROUP, VERSION = "polyreme.dev", "v1alpha1"
PLURALS = {definition.kind: definition.plural for definition in DEFINITIONS}
GPU = "nvidia.com/gpu"
RACK = {"name": "rack", "nodeLabel": "example.com/rack"}
ZONE = {"name": "zone", "nodeLabel": "topology.kubernetes.io/zone"}
XID = {"name": "lost", "action": "Evict", "onXids": [79]}
ONE = {"name": "one", "dataset": "sample/one"}
WEIGHTS = [{"source": "one", "weight": 1}]

Case = tuple[str, dict[str, Any], tuple[str, ...]]

RULED: list[Case] = [
    ("TrainingJob", {"metadata.name": "a" * 41}, ("metadata.name " + "a" * 41, "DNS label of at most 40 characters")),
    ("TrainingJob", {"metadata.name": "a.b"}, ("metadata.name a.b must be a DNS label", "choose another name")),
    ("TrainingJob", {"spec.model": DROP}, ("spec:", "model is required with workers.runtime.mode Launcher; set it")),
    ("TrainingJob", {"spec.data": DROP}, ("spec:", "data is required with workers.runtime.mode Launcher; set it")),
    ("TrainingJob", {"spec.training": DROP}, ("training is required with workers.runtime.mode Launcher; set it",)),
    (
        "TrainingJob",
        {"spec.evaluation": {"sets": [{"name": "a", "dataset": "sample/one@3"}]}},
        ("evaluation.sets holds sample/one@3, which data.sources train on", "choose a dataset that is held out"),
    ),
    (
        "TrainingJob",
        {"spec.workers": {"replicas": 2, "minReplicas": 3}},
        ("spec.workers:", "replicas 2 lies below minReplicas 3; raise replicas or lower minReplicas"),
    ),
    (
        "TrainingJob",
        {"spec.workers": {"replicas": 3, "maxReplicas": 2}},
        ("spec.workers:", "replicas 3 lies above maxReplicas 2; lower replicas or raise maxReplicas"),
    ),
    (
        "TrainingJob",
        {"spec.topology": {"required": "rack", "preferred": "zone"}},
        ("spec.topology:", "required rack and preferred zone exclude each other; drop one"),
    ),
    ("TrainingJob", {"spec.topology": {"sliceSize": 2}}, ("spec.topology:", "sliceSize 2 stands alone", "set both or")),
    ("TrainingJob", {"spec.topology": {"sliceLevel": "rack"}}, ("sliceLevel rack stands alone", "set both or none")),
    ("TrainingJob", {"spec.parallelism": {"dp": 2}}, ("spec.parallelism:", "mode Auto chooses", "seen dp 2; use mode")),
    ("TrainingJob", {"spec.parallelism": {"mode": "Explicit", "ep": 2}}, ("mode Explicit needs dp; set dp",)),
    (
        "TrainingJob",
        {"spec.failurePolicy": {"rules": [{"action": "Fail"}]}},
        ("spec.failurePolicy.rules[0]:", "action Fail has neither onExitCodes nor onPodConditions; set exactly one"),
    ),
    (
        "TrainingJob",
        {
            "spec.failurePolicy": {
                "rules": [
                    {
                        "action": "Fail",
                        "onExitCodes": {"operator": "In", "values": [1]},
                        "onPodConditions": [{"type": "A"}],
                    }
                ]
            }
        },
        ("action Fail has both onExitCodes and onPodConditions; set exactly one",),
    ),
    (
        "TrainingJob",
        {"spec.data.sources": [ONE, ONE]},
        ("spec.data:", 'two sources have the same name, seen ["one", "one"]', "rename one"),
    ),
    ("TrainingJob", {"spec.data.sources.0.weight": 0}, ('weight is 0 of every source of ["one"]', "above 0")),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": step, "weights": WEIGHTS} for step in (5, 3)]},
        ("spec.data:", "fromStep of schedule must rise, seen [5, 3]; order the changes"),
    ),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": 5, "weights": WEIGHTS}] * 2},
        ("spec.data.schedule[1]:", "Duplicate value", '"fromStep":5'),
    ),
    (
        "TrainingJob",
        {"spec.data.schedule": [{"fromStep": 5, "weights": [{"source": "one", "weight": 0}]}]},
        ("spec.data.schedule[0]:", "every weight from step 5 on is 0; raise one"),
    ),
    ("TrainingQueue", {"metadata.name": "a" * 64}, ("metadata.name " + "a" * 64, "at most 63 characters")),
    ("TrainingQueue", {"spec.parent": "one"}, ("spec.parent one is the queue itself; name another queue",)),
    (
        "TrainingQueue",
        {"spec.parent": "all", "spec.quotas": [{"resource": GPU, "nominal": 1, "lendingLimit": 2}]},
        ("spec.quotas[0]:", f"lendingLimit 2 lies above nominal 1 of {GPU}; lower lendingLimit or raise nominal"),
    ),
    (
        "TrainingQueue",
        {"spec.quotas": [{"resource": "cpu", "nominal": 1}, {"resource": GPU, "nominal": 1, "borrowingLimit": 2}]},
        ("spec:", f"quota of {GPU} has a borrowingLimit or a lendingLimit, but parent is empty", "set parent or drop"),
    ),
    (
        "TrainingQueue",
        {"spec.quotas": [{"resource": GPU, "nominal": 1}] * 2},
        ("spec.quotas[1]:", "Duplicate value", GPU),
    ),
    ("ClusterTopology", {"metadata.name": "a.b"}, ("metadata.name a.b must be a DNS label",)),
    (
        "ClusterTopology",
        {"spec.levels": [RACK, {**ZONE, "name": "rack"}]},
        ("spec:", 'two levels have the same name, seen ["rack", "rack"]; names are unique, rename one'),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [{"name": "row", "nodeLabel": "a"}, {"name": "rack", "nodeLabel": "a"}]},
        ("spec:", 'two levels have the same nodeLabel, seen ["a", "a"]; labels are unique, change one'),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [ZONE | {"distance": 1}, RACK | {"distance": 2}]},
        ("spec:", "distance rises towards the hosts, seen [1, 2]; distances fall from top to bottom, change one"),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [ZONE, {**RACK, "name": "host"}]},
        ("spec.levels[1]:", "level host with nodeLabel example.com/rack is the host", "drop it"),
    ),
    (
        "ClusterTopology",
        {"spec.levels": [{**RACK, "nodeLabel": "kubernetes.io/hostname"}]},
        ("level rack with nodeLabel kubernetes.io/hostname is the host",),
    ),
    ("NodeFaultPolicy", {"metadata.name": "a.b"}, ("metadata.name a.b must be a DNS label",)),
    (
        "NodeFaultPolicy",
        {"spec.rules": [{**XID, "onXids": []}]},
        ("spec.rules[0]:", "rule lost has neither onXids nor onNodeConditions; set exactly one"),
    ),
    (
        "NodeFaultPolicy",
        {"spec.rules": [{**XID, "onNodeConditions": [{"type": "A"}]}]},
        ("rule lost has both onXids and onNodeConditions; set exactly one",),
    ),
    (
        "NodeFaultPolicy",
        {"spec.rules": [XID, XID]},
        ("spec:", 'two rules have the same name, seen ["lost", "lost"]; names are unique, rename one'),
    ),
]

BOUNDED: list[Case] = [
    (
        "TrainingJob",
        {"spec.workers": {"replicas": 15_001}},
        ("spec.workers.replicas", "15001", "less than or equal to"),
    ),
    ("TrainingJob", {"spec.workers": {"replicas": 0}}, ("spec.workers.replicas", "0", "greater than or equal to 1")),
    ("TrainingJob", {"spec.workers": {"devices": 65}}, ("spec.workers.devices", "65", "less than or equal to 64")),
    ("TrainingJob", {"spec.workers": {"runtime": {"mode": "Torchrun"}}}, ("spec.workers.runtime.mode", '"Torchrun"')),
    ("TrainingJob", {"spec.queueName": "A.b"}, ("spec.queueName", '"A.b"', "should match")),
    ("TrainingJob", {"spec.training": {"packsPerStep": 4}}, ("spec.training.steps", "Required value")),
    ("TrainingJob", {"spec.data.sources": []}, ("spec.data.sources", "should have at least 1 items")),
    ("TrainingJob", {"spec.training.optimizer": {"learningRate": "fast"}}, ("learningRate", '"fast"', "should match")),
    ("TrainingJob", {"spec.training.optimizer": {"learningRate": 0.1}}, ("learningRate", "must be of type string")),
    ("TrainingJob", {"spec.trainng": {}}, ('unknown field "spec.trainng"',)),
    ("TrainingQueue", {"spec.weight": 0}, ("spec.weight", "0", "greater than or equal to 1")),
    ("TrainingQueue", {"spec.parent": "A"}, ("spec.parent", '"A"', "should match")),
    ("TrainingQueue", {"spec.stopPolicy": "Stop"}, ("spec.stopPolicy", '"Stop"', "HoldAndDrain")),
    ("TrainingQueue", {"spec.quotas": [{"resource": GPU}]}, ("spec.quotas[0].nominal", "Required value")),
    ("TrainingQueue", {"spec.quotas": [{"resource": "a b", "nominal": 1}]}, ("spec.quotas[0].resource", '"a b"')),
    ("TrainingQueue", {"spec.quotas": [{"resource": GPU, "nominal": -1}]}, ("spec.quotas[0].nominal", "-1")),
    (
        "TrainingQueue",
        {"spec.quotas": [{"resource": f"r{at}", "nominal": 1} for at in range(33)]},
        ("spec.quotas", "33", "at most 32 items"),
    ),
    ("TrainingQueue", {"spec.preemption": {"maxPerJob": 1001}}, ("spec.preemption.maxPerJob", "1001")),
    ("TrainingQueue", {"spec.backfill": {"mode": "On"}}, ("spec.backfill.mode", '"On"', "Conservative")),
    ("TrainingQueue", {"spec.quota": {GPU: 1}}, ('unknown field "spec.quota"',)),
    ("ClusterTopology", {"spec.levels": []}, ("spec.levels", "should have at least 1 items")),
    (
        "ClusterTopology",
        {"spec.levels": [{"name": f"l{at}", "nodeLabel": f"l{at}"} for at in range(9)]},
        ("spec.levels", "9", "at most 8 items"),
    ),
    ("ClusterTopology", {"spec.levels": [{"name": "rack"}]}, ("spec.levels[0].nodeLabel", "Required value")),
    ("ClusterTopology", {"spec.levels": [{**RACK, "nodeLabel": "a b"}]}, ("spec.levels[0].nodeLabel", '"a b"')),
    ("ClusterTopology", {"spec.levels": [{**RACK, "distance": 0}]}, ("spec.levels[0].distance", "0")),
    ("NodeFaultPolicy", {"spec.mode": "On"}, ("spec.mode", '"On"', "Enforce")),
    ("NodeFaultPolicy", {"spec.rules": [{**XID, "action": "Reboot"}]}, ("spec.rules[0].action", '"Reboot"')),
    ("NodeFaultPolicy", {"spec.breaker": {"nodesPercent": 101}}, ("spec.breaker.nodesPercent", "101")),
]

FROZEN: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"queueName": "other"}, ("spec.queueName may not change from default to other while the job exists; delete",)),
    ({"training": {"steps": 11}}, ("spec.training.steps may not change from 10 to 11 while the job exists",)),
    ({"workers": {"devices": 2}}, ("spec.workers.devices may not change from 1 to 2",)),
    ({"workers": {"minReplicas": 1}}, ("spec.workers.minReplicas may not change from nothing to 1",)),
    ({"workers": {"maxReplicas": None}}, ("spec.workers.maxReplicas may not change from 8 to nothing",)),
    ({"workers": {"maxReplicas": 9}}, ("spec.workers.maxReplicas may not change from 8 to 9",)),
    ({"workers": {"template": {"spec": {}}}}, ("spec.workers.template may not change while the job exists",)),
    ({"workers": {"runtime": {"mode": "Environment"}}}, ("mode may not change from Launcher to Environment",)),
    (
        {"evaluation": {"sets": [{"name": "a", "dataset": "h"}]}},
        ("spec.evaluation may not change from nothing to some",),
    ),
    ({"export": None}, ("spec.export may not change from something to nothing",)),
    ({"topology": {"required": "rack"}}, ("spec.topology.required may not change from nothing to rack",)),
    ({"data": {"sources": [{**ONE, "weight": 2}]}}, ("spec.data.sources may not change while the job exists",)),
    ({"managedBy": "someone"}, ("spec.managedBy may not change from polyreme.dev/operator to someone",)),
    ({"workers": {"replicas": 9}}, ("replicas 9 lies above maxReplicas 8; lower replicas or raise maxReplicas",)),
]

BASES: dict[str, dict[str, Any]] = {
    "ClusterTopology": {"levels": [ZONE, RACK]},
    "TrainingQueue": {},
    "NodeFaultPolicy": {},
}


def thing(kind: str, changes: dict[str, Any]) -> dict[str, Any]:
    """Return the smallest object of a kind, with changes by path."""
    if kind == "TrainingJob":
        return job_with(changes)
    base: dict[str, Any] = {
        "apiVersion": f"{GROUP}/{VERSION}",
        "kind": kind,
        "metadata": {"name": "one"},
        "spec": dict(BASES[kind]),
    }
    for path, value in changes.items():
        part, _, field = path.partition(".")
        base[part][field] = value
    return base


@pytest.fixture(scope="module")
def objects(kubeconfig: str) -> Iterator[Any]:
    with api_client(kubeconfig) as api:
        yield client.CustomObjectsApi(api)


def create(objects: Any, manifest: dict[str, Any], *, namespace: str = "default") -> Any:
    """Have the server check an object and keep none; fields that it does not know are refused."""
    plural = PLURALS[manifest["kind"]]
    options = {"dry_run": "All", "field_validation": "Strict"}
    if manifest["kind"] == "TrainingJob":
        return objects.create_namespaced_custom_object(GROUP, VERSION, namespace, plural, manifest, **options)
    return objects.create_cluster_custom_object(GROUP, VERSION, plural, manifest, **options)


def refusal(call: Any, *arguments: Any, **options: Any) -> str:
    with pytest.raises(ApiException) as refused:
        call(*arguments, **options)
    assert refused.value.status in {400, 422}, refused.value.body
    said: str = json.loads(str(refused.value.body))["message"]
    return said


def case_id(case: Case) -> str:
    return f"{case[0]}: {case[2][-1][:60]}"


@pytest.mark.parametrize("kind", PLURALS)
def test_what_the_cases_change_is_accepted_as_it_is(objects: Any, kind: str) -> None:
    assert create(objects, thing(kind, {}))["metadata"]["uid"]


@pytest.mark.parametrize(("kind", "changes", "words"), RULED, ids=map(case_id, RULED))
def test_a_rule_across_fields_refuses(objects: Any, kind: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refusal(create, objects, thing(kind, changes))
    assert [part for part in words if part not in said] == [], said


@pytest.mark.parametrize(("kind", "changes", "words"), BOUNDED, ids=map(case_id, BOUNDED))
def test_a_bound_refuses(objects: Any, kind: str, changes: dict[str, Any], words: tuple[str, ...]) -> None:
    said = refusal(create, objects, thing(kind, changes))
    assert [part for part in words if part not in said] == [], said


def test_every_rule_has_a_case(objects: Any) -> None:
    said = "\n".join(refusal(create, objects, thing(kind, changes)) for kind, changes, _ in RULED)
    for rule in (rule for rules in (*RULES.values(), *OBJECT_RULES.values()) for rule in rules):
        spoken = ".*".join(re.escape(piece) for piece in re.split(r"\{[^{}]*\}", rule.words))
        assert re.search(spoken, said), rule.words


@pytest.fixture(scope="module")
def kept(kubeconfig: str, objects: Any) -> Iterator[str]:
    """Namespace of a job that exists."""
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        manifest = job_with({"spec.workers": {"maxReplicas": 8}, "spec.export": {}})
        objects.create_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", manifest)
        yield namespace


def patch(objects: Any, namespace: str, body: dict[str, Any]) -> Any:
    return objects.patch_namespaced_custom_object(
        GROUP, VERSION, namespace, "trainingjobs", "small", body, dry_run="All", field_validation="Strict"
    )


@pytest.mark.parametrize(("change", "words"), FROZEN, ids=[words[-1][:60] for _, words in FROZEN])
def test_a_job_that_exists_keeps_its_spec(
    objects: Any, kept: str, change: dict[str, Any], words: tuple[str, ...]
) -> None:
    said = refusal(patch, objects, kept, {"spec": change})
    assert [part for part in words if part not in said] == [], said


@pytest.mark.parametrize(
    "body",
    [
        {"spec": {"suspend": True}},
        {"spec": {"workers": {"replicas": 8}}},
        {"spec": {"suspend": True, "workers": {"replicas": 1}}},
        {"metadata": {"labels": {"a": "b"}}},
    ],
)
def test_suspend_replicas_and_metadata_may_change(objects: Any, kept: str, body: dict[str, Any]) -> None:
    assert patch(objects, kept, body)["metadata"]["name"] == "small"


def test_an_administrator_may_change_everything_of_a_queue(objects: Any) -> None:
    manifest = thing("TrainingQueue", {"metadata.name": "changed"})
    plural = PLURALS["TrainingQueue"]
    objects.create_cluster_custom_object(GROUP, VERSION, plural, manifest)
    try:
        changed = {
            "parent": "all", "weight": 7, "stopPolicy": "HoldAndDrain", "agingSeconds": 60,
            "quotas": [{"resource": GPU, "nominal": 8, "borrowingLimit": 1, "lendingLimit": 8}],
            "preemption": {"withinQueue": "Never", "reclaim": "Never"}, "backfill": {"mode": "Off"},
        }  # fmt: skip
        done = objects.patch_cluster_custom_object(GROUP, VERSION, plural, "changed", {"spec": changed})
        assert done["spec"]["weight"] == 7
        assert done["spec"]["preemption"]["maxPerJob"] == 3
    finally:
        objects.delete_cluster_custom_object(GROUP, VERSION, plural, "changed")


def test_two_conditions_of_one_type_are_refused(objects: Any, kept: str) -> None:
    condition = {"type": "Queued", "status": "True", "reason": "WaitingForCapacity"}
    said = refusal(
        objects.patch_namespaced_custom_object_status,
        GROUP, VERSION, kept, "trainingjobs", "small", {"status": {"conditions": [condition] * 2}},
    )  # fmt: skip
    assert "Duplicate value" in said
    assert '"type":"Queued"' in said
