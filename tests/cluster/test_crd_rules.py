"""What the API server itself refuses, without our operator: one sentence with field, value and rule."""

import json
import re
from collections.abc import Iterator
from typing import Any

import pytest
from kubernetes import client
from kubernetes.client import ApiException

from polyreme_api.crd.definitions import DEFINITIONS
from polyreme_api.crd.rules import OBJECT_RULES, RULES, TEMPLATE_RULES
from tests.cluster.crd_cases import BOUNDED, GPU, ONE, RULED, case_id, thing
from tests.cluster.kube import api_client, new_namespace
from tests.unit.api.jobs import job_with

GROUP, VERSION = "polyreme.dev", "v1alpha1"
PLURALS = {definition.kind: definition.plural for definition in DEFINITIONS}
FROZEN: list[tuple[dict[str, Any], tuple[str, ...]]] = [
    ({"training": {"seed": 11}}, ("spec.training.seed may not change from 0 to 11; recreate the job",)),
    ({"training": {"steps": None, "epochs": 2}}, ("spec.training.steps may not change from 10 to nothing",)),
    ({"workers": {"devices": 2}}, ("spec.workers.devices may not change from 1 to 2",)),
    ({"workers": {"minReplicas": 1}}, ("spec.workers.minReplicas may not change from nothing to 1",)),
    ({"workers": {"maxReplicas": None}}, ("spec.workers.maxReplicas may not change from 8 to nothing",)),
    ({"workers": {"maxReplicas": 9}}, ("spec.workers.maxReplicas may not change from 8 to 9",)),
    ({"workers": {"template": {"spec": {}}}}, ("spec.workers.template may not change; recreate the job",)),
    ({"workers": {"runtime": {"mode": "Environment"}}}, ("mode may not change from Launcher to Environment",)),
    (
        {"evaluation": {"sets": [{"name": "a", "dataset": "h"}]}},
        ("spec.evaluation may not change from nothing to some",),
    ),
    ({"export": None}, ("spec.export may not change from something to nothing",)),
    ({"topology": {"required": "rack"}}, ("spec.topology.required may not change from nothing to rack",)),
    ({"topology": None}, ("spec.topology may not change from something to nothing; recreate the job",)),
    ({"health": {"nodeLostSeconds": 61}}, ("spec.health may not change from nothing to something",)),
    ({"failurePolicy": {"backoff": {"maxSeconds": 61}}}, ("failurePolicy.backoff.maxSeconds may not change from 300",)),
    (
        {"export": None, "evaluation": {"sets": [{"name": "a", "dataset": "h"}]}},
        ("spec.evaluation may not change from nothing to something",),
    ),
    ({"data": {"sources": [{**ONE, "weight": 2}]}}, ("spec.data.sources may not change; recreate the job",)),
    ({"managedBy": "someone"}, ("spec.managedBy may not change from polyreme.dev/operator to someone",)),
    ({"workers": {"replicas": 9}}, ("replicas 9 is above maxReplicas 8; lower replicas or raise maxReplicas",)),
]


CHANGES: list[dict[str, Any]] = [
    {"fromStep": step, "weights": [{"source": "one", "weight": step}]} for step in (5, 7, 9)
]


WAITS = ({"queueName": "other"}, {"priorityClassName": "urgent"}, {"priority": 7})


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
    for rule in (
        rule
        for rules in (*RULES.values(), *OBJECT_RULES.values(), *TEMPLATE_RULES.values())
        for rule in rules
        if "oldSelf" not in rule.rule
    ):
        spoken = ".*".join(re.escape(piece) for piece in re.split(r"\{[^{}]*\}", rule.words))
        assert re.search(spoken, said), rule.words


@pytest.fixture(scope="module")
def kept(kubeconfig: str, objects: Any) -> Iterator[str]:
    """Namespace of a job that exists."""
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        parts = {"spec.export": {}, "spec.topology": {"exclusive": "rack"}, "spec.failurePolicy": {}}
        sizes = {"spec.model.overrides": {"decoder": {"layers": 3, "routed_scaling": "2.5"}}}
        manifest = job_with({"spec.workers": {"maxReplicas": 8}, **parts, **sizes})
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
        {"spec": {"training": {"steps": 20, "optimizer": {"decaySteps": 3, "finalLearningRate": "1e-5"}}}},
    ],
)
def test_suspend_replicas_and_metadata_may_change(objects: Any, kept: str, body: dict[str, Any]) -> None:
    assert patch(objects, kept, body)["metadata"]["name"] == "small"


def test_queue_class_and_priority_may_change_until_the_job_is_admitted_and_after_it(
    objects: Any, kubeconfig: str
) -> None:
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        objects.create_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", job_with({}))

        def admitted(status: str) -> None:
            condition = {"type": "Admitted", "status": status, "reason": "Admitted"}
            body = {"status": {"conditions": [condition]}}
            objects.patch_namespaced_custom_object_status(GROUP, VERSION, namespace, "trainingjobs", "small", body)

        for change in WAITS:
            assert patch(objects, namespace, {"spec": change})
        admitted("True")
        for change in WAITS:
            said = refusal(patch, objects, namespace, {"spec": change})
            assert "spec.queueName default, spec.priorityClassName  and spec.priority 0 may not change while" in said
        assert patch(objects, namespace, {"spec": {"suspend": True}})
        admitted("False")
        for change in WAITS:
            assert patch(objects, namespace, {"spec": change})


def test_the_end_of_a_job_may_change_in_its_last_stage_until_it_has_finished(objects: Any, kubeconfig: str) -> None:
    def stages(*steps: int) -> dict[str, Any]:
        named = [{"name": f"s{at}", "steps": of} for at, of in enumerate(steps)]
        return {"training": {"steps": sum(steps), "stages": named}}

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        made = job_with({"spec.training.steps": 10, "spec.training.stages": stages(4, 6)["training"]["stages"]})
        objects.create_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", made)
        assert patch(objects, namespace, {"spec": stages(4, 8)})
        only = "spec.training.stages may change in its last entry only; recreate the job"
        for changed in (stages(5, 6), stages(4, 6, 1)):
            assert only in refusal(patch, objects, namespace, {"spec": changed})
        body = {"status": {"completedAt": "2026-11-27T00:00:00Z"}}
        objects.patch_namespaced_custom_object_status(GROUP, VERSION, namespace, "trainingjobs", "small", body)
        said = refusal(patch, objects, namespace, {"spec": stages(4, 8)})
        assert "spec.training.steps may not change from 10 in a job that has finished; create a job with" in said


def test_the_schedule_of_a_job_that_exists_is_append_only(objects: Any, kubeconfig: str) -> None:
    """Checked by a server with the largest schedule too: its rule has a bounded cost."""
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        manifest = job_with({})
        objects.create_namespaced_custom_object(GROUP, VERSION, namespace, "trainingjobs", manifest)

        def scheduled(schedule: list[dict[str, Any]], *, dry: bool = False) -> Any:
            options = {"dry_run": "All"} if dry else {}
            body = {"spec": {"data": {"schedule": schedule}}}
            return objects.patch_namespaced_custom_object(
                GROUP, VERSION, namespace, "trainingjobs", "small", body, **options
            )

        def said(schedule: list[dict[str, Any]]) -> str:
            return refusal(lambda: scheduled(schedule, dry=True))

        scheduled(CHANGES[:1])
        scheduled(CHANGES[:2])
        may_only = "spec.data.schedule may only get more entries while the job exists, with fromStep above 7; keep"
        other: dict[str, Any] = {"fromStep": 6, "weights": [{"source": "one", "weight": 1}]}
        changed = {**CHANGES[0], "weights": [{"source": "one", "weight": 2}]}
        between, empty = [CHANGES[0], other, CHANGES[1]], {"fromStep": 9, "weights": [{"source": "one", "weight": 0}]}
        for schedule in ([], CHANGES[:1], CHANGES[1:], between, [changed, *CHANGES[1:]]):
            assert may_only in said(schedule), schedule
        assert "fromStep of schedule must rise" in said([CHANGES[1], CHANGES[0], CHANGES[2]])
        assert "every weight from step 9 on is 0" in said([*CHANGES[:2], empty])
        weights = [{"source": f"source-{at}", "weight": at + 1} for at in range(8)]
        most = [*CHANGES[:2]]
        most += [{"fromStep": step, "weights": weights} for step in range(8, 8 + 1022)]
        scheduled(most[:-1])
        done = scheduled(most)
        assert len(done["spec"]["data"]["schedule"]) == 1024
        status = {"status": {"step": 3}}
        objects.patch_namespaced_custom_object_status(GROUP, VERSION, namespace, "trainingjobs", "small", status)


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
