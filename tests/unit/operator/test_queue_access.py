"""Which jobs a queue accepts: by namespace, priority, and the resources that they request."""

import asyncio
import dataclasses
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef
from polyreme_operator.queueing.access import refusal
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.settings import Settings
from polyreme_operator.types.label_selector import Requirement, parse_selector, selects, words_of
from polyreme_operator.types.parse_settings import parse_queue
from polyreme_operator.types.queues import QueueView
from tests.unit.operator.operator_scenes import DEVICE, job
from tests.unit.operator.operator_stage import Stage
from tests.unit.operator.queue_scenes import queue

TEAM = (Requirement("team", "In", ("research",)),)
NAMESPACES = {"default": {"team": "research"}, "other": {"team": "web"}}


def queue_manifest(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_QUEUE,
        "metadata": {"name": name},
        "spec": {"quotas": [{"resource": DEVICE, "nominal": 2}], **spec},
    }


def namespace(name: str, **given: str) -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": given}}


def refused(where: str, queues: list[QueueView], *, namespace: str = "default", **fields: Any) -> str:
    seen = dataclasses.replace(job("j", queueName=where), namespace=namespace, **fields)
    return refusal(seen, QueueTree.of(queues), NAMESPACES)


@pytest.mark.parametrize("where", ["q", "below"])
def test_a_queue_accepts_jobs_of_selected_namespaces_alone_and_so_do_those_below_it(where: str) -> None:
    queues = [queue("q", 8, namespaces=TEAM), queue("below", 8, "q")]
    assert refused(where, queues) == ""
    assert refused(where, queues, namespace="other") == (
        "queue q does not accept jobs of namespace other: its namespaceSelector is team=research; "
        "change spec.queueName, or have the namespace labelled"
    )
    assert "namespace unknown" in refused(where, queues, namespace="unknown")


@pytest.mark.parametrize("where", ["q", "below"])
def test_a_queue_accepts_no_priority_above_its_maximum_or_that_of_a_parent(where: str) -> None:
    queues = [queue("q", 8, priority_max=100), queue("below", 8, "q", priority_max=1000)]
    assert refused(where, queues, priority=100) == ""
    assert refused(where, queues, priority=101) == (
        "queue q does not accept jobs of priority 101: its priorityMax is 100; change spec.priority"
    )


def test_a_queue_that_refuses_unnamed_resources_accepts_only_what_it_or_a_parent_limits() -> None:
    queues = [queue("q", 8), queue("strict", None, "q", refuses_unnamed=True)]
    limited = queues[0].quotas[0].resource
    assert refused("q", queues, requests=((limited, 1), ("cpu", 1000))) == ""
    assert refused("strict", queues, requests=((limited, 1), ("pods", 1), ("cpu", 0))) == ""
    assert refused("strict", queues, requests=((limited, 1), ("example.com/gpu", 1))) == (
        "queue strict does not accept requests for example.com/gpu: neither it nor a parent has a quota of that, "
        "and unnamedResources of strict is Refuse; add a quota, or drop the request"
    )


@pytest.mark.parametrize(
    ("given", "words", "selected"),
    [
        ({}, "", {"a", "b", "bare"}),
        ({"matchLabels": {"team": "a"}}, "team=a", {"a"}),
        (
            {"matchExpressions": [{"key": "team", "operator": "In", "values": ["a", "b"]}]},
            "team in (a, b)",
            {"a", "b"},
        ),
        (
            {"matchExpressions": [{"key": "team", "operator": "NotIn", "values": ["a"]}]},
            "team notin (a)",
            {"b", "bare"},
        ),
        ({"matchExpressions": [{"key": "team", "operator": "Exists"}]}, "team", {"a", "b"}),
        ({"matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]}, "!team", {"bare"}),
        (
            {"matchLabels": {"team": "a"}, "matchExpressions": [{"key": "team", "operator": "DoesNotExist"}]},
            "team=a,!team",
            set(),
        ),
    ],
)
def test_a_selector_selects_what_kubernetes_would(given: dict[str, Any], words: str, selected: set[str]) -> None:
    selector = parse_selector(given)
    known = {"a": {"team": "a"}, "b": {"team": "b"}, "bare": {"other": "a"}}
    assert words_of(selector) == words
    assert {name for name, found in known.items() if selects(selector, found)} == selected


def test_a_selector_with_an_unknown_field_makes_its_queue_unreadable_and_does_not_open_it() -> None:
    manifest = queue_manifest("q", namespaceSelector={"matchFields": []})
    manifest["metadata"] |= {"uid": "u", "resourceVersion": "1"}
    with pytest.raises(ValueError, match="matchFields"):
        parse_queue(manifest)


def test_a_missing_default_queue_is_unlimited_only_where_the_installation_says_so() -> None:
    assert QueueTree.of([]).in_order("default")
    assert not QueueTree.of([], default_unlimited=False).in_order("default")
    assert QueueTree.of([queue("default")], default_unlimited=False).in_order("default")


def test_a_job_of_another_namespace_preempts_no_one_and_holds_nothing() -> None:
    stage = Stage()

    async def story() -> None:
        stage.add_nodes(2)
        stage.store.create(namespace("default", team="web"))
        stage.store.create(namespace("research", team="research"))
        selector = {"matchLabels": {"team": "research"}}
        stage.store.create(queue_manifest("research", namespaceSelector=selector, priorityMax=1000))
        mine = stage.add_job("mine", queueName="research", workers={"replicas": 2})
        assert mine
        await asyncio.sleep(5)
        assert stage.condition("mine", "Queued")["reason"] == "QueueRefused"
        await _move(stage, "default", team="research")
        assert stage.condition("mine", "Admitted")["status"] == "True"
        # Its queue does not accept it any more: it keeps its place.
        await _move(stage, "default", team="web")
        assert stage.condition("mine", "Admitted")["status"] == "True"
        stage.add_job("thief", queueName="research", workers={"replicas": 2}, priority=1_000_000_000)
        await asyncio.sleep(100)
        found = stage.condition("thief", "Queued")
        assert (found["status"], found["reason"]) == ("True", "QueueRefused")
        assert "does not accept jobs of namespace default" in found["message"]
        assert not stage.condition("thief", "Admitted")
        assert not stage.condition("mine", "Preempted")
        assert len(list(stage.store.records("Pod"))) == 2
        assert len(stage.events("QueueRefused")) == 2
        await _move(stage, "default", team="research")
        assert "priority 1000000000" in stage.condition("thief", "Queued")["message"]
        ref = ObjectRef(kind=labels.KIND_QUEUE, name="research")
        assert stage.store.get(ref)["status"]["refused"] == 1

    stage.run(story)


async def _move(stage: Stage, name: str, **given: str) -> None:
    stage.store.change(ObjectRef(kind="Namespace", name=name), {"metadata": {"labels": given}})
    await asyncio.sleep(10)


def test_jobs_that_name_no_queue_wait_where_the_default_queue_is_missing_and_refused() -> None:
    stage = Stage(Settings(default_unlimited=False))

    async def story() -> None:
        stage.add_nodes(1)
        stage.add_job("mine")
        await asyncio.sleep(5)
        found = stage.condition("mine", "Queued")
        assert found["reason"] == "QueueMissing"
        assert "set queues.default: Unlimited in the chart" in found["message"]
        stage.store.create(queue_manifest("default"))
        await asyncio.sleep(5)
        assert stage.condition("mine", "Admitted")["status"] == "True"

    stage.run(story)


def test_a_waiting_job_whose_queue_is_changed_is_admitted_from_the_other_queue() -> None:
    stage = Stage()

    async def story() -> None:
        stage.add_nodes(2)
        stage.store.create(queue_manifest("full", stopPolicy="Hold"))
        stage.store.create(queue_manifest("open"))
        stage.add_job("mine", queueName="full", workers={"replicas": 2})
        await asyncio.sleep(5)
        assert stage.condition("mine", "Queued")["reason"] == "QueueStopped"
        ref = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="mine")
        stage.store.change(ref, {"spec": {"queueName": "open", "priority": 5}})
        await asyncio.sleep(10)
        assert stage.condition("mine", "Admitted")["status"] == "True"
        assert stage.status("mine")["priority"] == 5
        pods = [record.manifest for record in stage.store.records("Pod")]
        assert {each["metadata"]["labels"][labels.LABEL_QUEUE] for each in pods} == {"open"}
        await asyncio.sleep(5)
        usage = stage.store.get(ObjectRef(kind=labels.KIND_QUEUE, name="open"))["status"]["usage"]
        assert [each["used"] for each in usage] == [2]

    stage.run(story)
