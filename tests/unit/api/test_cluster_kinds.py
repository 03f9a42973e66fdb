"""What queues, topologies and fault policies refuse, and in which words."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fault_policy import NodeFaultPolicy
from polyreme_api.incident import NodeIncident
from polyreme_api.kinds import KINDS
from polyreme_api.queue import TrainingQueue
from polyreme_api.topology import ClusterTopology
from polyreme_planner.loading import load_object
from tests.unit.api.jobs import SMALLEST

GPU = "nvidia.com/gpu"
RACK = {"name": "rack", "nodeLabel": "example.com/rack"}
ZONE = {"name": "zone", "nodeLabel": "topology.kubernetes.io/zone"}
XID = {"name": "lost", "action": "Evict", "onXids": [79]}


def thing(kind: str, spec: dict[str, Any] | None, name: str = "one") -> dict[str, Any]:
    document = {"apiVersion": "polyreme.dev/v1alpha1", "kind": kind, "metadata": {"name": name}}
    return document if spec is None else {**document, "spec": spec}


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("TrainingQueue", {"quota": {GPU: 8}}, "unknown field: spec.quota, did you mean 'quotas'?"),
    ("TrainingQueue", {"parent": "A"}, "spec.parent is refused: 'A'"),
    ("TrainingQueue", {"parent": "one"}, "spec.parent is 'one', the queue itself; name another queue"),
    ("TrainingQueue", {"weight": 0}, "spec.weight is refused: 0"),
    ("TrainingQueue", {"stopPolicy": "Stop"}, "spec.stopPolicy is refused: 'Stop'"),
    ("TrainingQueue", {"quotas": [{"resource": GPU}]}, "field missing: spec.quotas.0.nominal is required"),
    ("TrainingQueue", {"quotas": [{"resource": GPU, "nominal": -1}]}, "spec.quotas.0.nominal is refused: -1"),
    ("TrainingQueue", {"quotas": [{"resource": "a b", "nominal": 1}]}, "spec.quotas.0.resource is refused: 'a b'"),
    (
        "TrainingQueue",
        {"quotas": [{"resource": GPU, "nominal": 1}] * 2},
        f"two entries for '{GPU}'; resources are unique",
    ),
    (
        "TrainingQueue",
        {"quotas": [{"resource": str(at), "nominal": 1} for at in range(33)]},
        "number of entries must be 32 or less",
    ),
    (
        "TrainingQueue",
        {"parent": "all", "quotas": [{"resource": GPU, "nominal": 1, "lendingLimit": 2}]},
        f"lendingLimit 2 is above nominal 1 of {GPU}; lower lendingLimit or raise nominal",
    ),
    (
        "TrainingQueue",
        {"quotas": [{"resource": GPU, "nominal": 1, "borrowingLimit": 2}]},
        f"{GPU} has a borrowingLimit or a lendingLimit, but parent is empty",
    ),
    ("TrainingQueue", {"preemption": {"withinQueue": "Any"}}, "spec.preemption.withinQueue is refused: 'Any'"),
    ("TrainingQueue", {"backfill": {"mode": "On"}}, "spec.backfill.mode is refused: 'On'"),
    ("ClusterTopology", {}, "field missing: spec.levels is required"),
    ("ClusterTopology", {"levels": []}, "spec.levels is refused: []"),
    ("ClusterTopology", {"levels": [{"name": "rack"}]}, "field missing: spec.levels.0.nodeLabel is required"),
    ("ClusterTopology", {"levels": [{**RACK, "nodeLabel": "a b"}]}, "spec.levels.0.nodeLabel is refused: 'a b'"),
    ("ClusterTopology", {"levels": [{**RACK, "distance": 0}]}, "spec.levels.0.distance is refused: 0"),
    ("ClusterTopology", {"levels": [RACK, {**ZONE, "name": "rack"}]}, "two levels have the name 'rack'"),
    (
        "ClusterTopology",
        {"levels": [RACK, {**RACK, "name": "row"}]},
        "two levels have the nodeLabel 'example.com/rack'",
    ),
    (
        "ClusterTopology",
        {"levels": [{**RACK, "name": "host"}]},
        "level 'host' with nodeLabel 'example.com/rack' is the host",
    ),
    (
        "ClusterTopology",
        {"levels": [{**RACK, "nodeLabel": "kubernetes.io/hostname"}]},
        "level 'rack' with nodeLabel 'kubernetes.io/hostname' is the host, which is always below the last level",
    ),
    (
        "ClusterTopology",
        {"levels": [{**ZONE, "distance": 1}, RACK | {"distance": 2}]},
        "distance 1 of 'zone' is below distance 2 of 'rack' below it",
    ),
    ("NodeFaultPolicy", {"rules": [{**XID, "onXids": []}]}, "rule 'lost' has either onXids or onNodeConditions"),
    ("NodeFaultPolicy", {"rules": [{**XID, "onNodeConditions": [{"type": "A"}]}]}, "rule 'lost' has either onXids or"),
    ("NodeFaultPolicy", {"rules": [XID, XID]}, "two rules are named 'lost'; names are unique"),
    ("NodeFaultPolicy", {"rules": [{**XID, "action": "Reboot"}]}, "spec.rules.0.action is refused: 'Reboot'"),
    ("NodeFaultPolicy", {"breaker": {"nodesPercent": 0}}, "spec.breaker.nodesPercent is refused: 0"),
]


@pytest.mark.parametrize(("kind", "spec", "words"), REFUSED, ids=[words[:60] for _, _, words in REFUSED])
def test_a_wrong_object_is_refused_with_the_field_and_the_rule(kind: str, spec: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        load_object(thing(kind, spec))
    assert words in str(refused.value)


@pytest.mark.parametrize("kind", sorted(set(KINDS) - {"TrainingJob"}))
@pytest.mark.parametrize("name", ["Big", "a.b", "a" * 64, ""])
def test_names_are_labels(kind: str, name: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"metadata\.name is refused"):
        load_object(thing(kind, {"levels": [RACK]} if kind == "ClusterTopology" else {}, name))


@pytest.mark.parametrize(
    ("document", "words"),
    [
        (None, "not a Kubernetes object: NoneType"),
        ([], "not a Kubernetes object: list"),
        ({}, "kind is not supported: None, expected one of TrainingJob, TrainingQueue"),
        ({"kind": ["a"]}, "kind is not supported"),
        (thing("Pod", {}), "kind is not supported: 'Pod'"),
    ],
)
def test_what_is_none_of_our_kinds_is_refused(document: object, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words):
        load_object(document)


def test_every_kind_loads_as_its_type() -> None:
    assert load_object(SMALLEST).kind == "TrainingJob"
    assert isinstance(load_object(thing("TrainingQueue", None)), TrainingQueue)
    assert isinstance(load_object(thing("ClusterTopology", {"levels": [ZONE, RACK]})), ClusterTopology)
    assert isinstance(load_object(thing("NodeFaultPolicy", None)), NodeFaultPolicy)
    assert isinstance(load_object(thing("NodeIncident", {"node": "n1", "since": "2026-01-31T12:00:00Z"})), NodeIncident)


def test_the_defaults_of_a_queue_are_the_documented_ones() -> None:
    queue = load_object(thing("TrainingQueue", None))
    spec = queue.to_object()["spec"]
    assert spec == {
        "parent": "",
        "quotas": [],
        "weight": 1,
        "stopPolicy": "None",
        "fairSharing": {"halfLifeSeconds": 86_400},
        "agingSeconds": 0,
        "preemption": {
            "withinQueue": "LowerPriority", "reclaim": "Any", "minRuntimeSeconds": 0, "maxPerJob": 3,
            "windowSeconds": 86_400, "cooldownSeconds": 60,
        },
        "setAsideSeconds": 900,
        "backfill": {"mode": "Conservative"},
        "unnamedResources": "Allow",
    }  # fmt: skip
    assert load_object(queue.to_object()) == queue


def test_a_status_of_a_newer_version_is_read() -> None:
    document = {**thing("TrainingQueue", None), "status": {"pending": 3, "mood": "good"}}
    queue = load_object(document)
    assert isinstance(queue, TrainingQueue)
    assert queue.status.pending == 3
