"""Objects that are stored although they break the schemas of their kinds.

They come from before a definition was tightened, from another version, or from a controller that writes what it likes.
"""

from __future__ import annotations

import random
from typing import Any

from polyreme_api import labels
from polyreme_api.data_report import ANNOTATION_DATA
from polyreme_cluster.port import Manifest
from polyreme_simulator.ownership import MALFORMED

DEVICES = 6
"""More than any node has: schedulers look at such a job, and never give it a place that others need."""
TEMPLATES: tuple[Any, ...] = (
    {"spec": {"affinity": "spread"}},
    {"spec": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": ["x"]}}}},
    {
        "spec": {
            "affinity": {
                "nodeAffinity": {
                    "requiredDuringSchedulingIgnoredDuringExecution": {
                        "nodeSelectorTerms": [
                            {"matchExpressions": [{"key": "a", "operator": "Gt", "values": ["x"]}, 3]}
                        ]
                    }
                }
            }
        }
    },
    {"spec": {"tolerations": {"key": "a"}}},
    {"spec": {"tolerations": ["a", "b"]}},
    {"spec": {"nodeSelector": []}},
    {"spec": {"nodeSelector": {"a": 1}}},
    {"spec": {"initContainers": ["x"]}},
    {"spec": {"containers": ["x"]}},
    {"spec": {"containers": [{"resources": {"requests": {"cpu": "1e999999"}}}]}},
    {"spec": {"containers": [{"resources": {"requests": ["cpu"]}}]}},
    {"spec": {"containers": [{"env": {"A": "b"}}]}},
    {"spec": {"overhead": "x"}},
    {"spec": {"volumes": "none"}},
    {"spec": "oops"},
    {"metadata": "oops"},
    {"metadata": {"labels": ["a"]}},
)
SPECS: tuple[Any, ...] = (
    "oops",
    [],
    {},
    {"workers": "two"},
    {"workers": {"replicas": "two"}},
    {"workers": {"replicas": -1, "devices": 10**12}},
    {"training": {"steps": None}},
    {"priority": 1e300},
    {"topology": ["rack"]},
    {"queueName": 7},
    {"failurePolicy": {"rules": "none"}},
)
"""What each puts in place of a job's spec, or of parts of it."""
STATUSES: tuple[Any, ...] = (
    {"conditions": "x"},
    {"attempt": {"number": -1}},
    {"attempt": "first"},
    {"restartRecords": [{"cause": 3}]},
    {"accounting": {"effectiveMilliseconds": "many"}},
)
NODES: tuple[Any, ...] = (
    {"status": {}},
    {"status": {"allocatable": {"cpu": "1e999999", labels.RESOURCE_DEVICE: "many"}, "conditions": []}},
    {"status": {"allocatable": ["cpu"], "conditions": "Ready"}},
    {"status": {"allocatable": {"cpu": "4"}, "conditions": [{"type": "Ready"}]}},
    {"spec": {"taints": "all"}, "status": {"allocatable": {"cpu": "4"}, "conditions": []}},
    {"spec": {"taints": [{"effect": "NoSchedule"}]}, "status": {"allocatable": {"cpu": "4"}}},
)
PODS: tuple[Any, ...] = (
    {"spec": {"containers": None}},
    {"spec": {"containers": ["x"]}},
    {"spec": {"containers": [{"resources": {"requests": {"cpu": "1e999999"}}}]}},
    {"spec": {"containers": [{"resources": "few"}]}},
    {"spec": {"containers": [], "overhead": "x", "initContainers": "y"}},
    {"spec": {"containers": []}, "status": {"phase": ["Running"], "conditions": "x"}},
)
QUEUES: tuple[Any, ...] = (
    "oops",
    {"quotas": "none"},
    {"quotas": [{"resource": labels.RESOURCE_DEVICE, "nominal": "many"}]},
    {"parent": ["a"]},
    {"preemption": "Never"},
)
REPORTS = ("", "{", "[]", "7", '{"state": "Done"}', '{"state": "Processed", "about": 7}', "x" * 9000)
"""What the annotation with the datahub controller's report may hold."""
PROGRESS = ("{", "[]", '{"attempt": "first"}', '{"attempt": 1, "step": -1}')


def draw_malformed(rng: random.Random, *, number: int, nodes: list[str]) -> tuple[Manifest, dict[str, Any] | None]:
    """Draw an object, and the status that it gets after its creation."""
    name = f"{MALFORMED}{number}"
    kind = rng.choice(("TrainingJob", "TrainingJob", "TrainingJob", "TrainingQueue", "Pod", "Node", "Lease"))
    tags = {
        labels.LABEL_JOB: name,
        labels.LABEL_JOB_UID: f"{rng.getrandbits(64):016x}",
        labels.LABEL_INDEX: rng.choice(("x", "-1", "99999999999999999999", "")),
        labels.LABEL_REPLACEMENT: rng.choice(("y", "0")),
    }
    metadata: dict[str, Any] = {"name": name, "namespace": "default"}
    match kind:
        case "TrainingJob":
            body, status = _job(rng)
            # Of a generator of its own: it changes no other draw.
            own = random.Random(f"report of {name}")
            if own.random() < 0.5:
                metadata["annotations"] = {ANNOTATION_DATA: own.choice(REPORTS)}
            return {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": metadata, **body}, status
        case "TrainingQueue":
            head = {"apiVersion": labels.API_VERSION, "kind": kind, "metadata": {"name": name}}
            return {**head, "spec": rng.choice(QUEUES)}, None
        case "Node":
            body = rng.choice(NODES)
            return {"apiVersion": "v1", "kind": kind, "metadata": {"name": name}, **body}, None
        case "Lease":
            annotations = {labels.ANNOTATION_PROGRESS: rng.choice(PROGRESS)}
            head = {"apiVersion": "coordination.k8s.io/v1", "kind": kind}
            return {**head, "metadata": {**metadata, "labels": tags, "annotations": annotations}, "spec": {}}, None
        case _:
            body = rng.choice(PODS)
            spec = {**body["spec"], **({"nodeName": rng.choice(nodes)} if nodes else {})}
            given = {**metadata, **({"labels": tags} if rng.random() < 0.5 else {})}
            return {"apiVersion": "v1", "kind": kind, "metadata": given, **body, "spec": spec}, None


def _job(rng: random.Random) -> tuple[dict[str, Any], dict[str, Any] | None]:
    spec: Any = {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
        "training": {"steps": 20, "packsPerStep": 12},
        "workers": {"replicas": 1, "devices": DEVICES},
    }
    match rng.choice(("template", "template", "spec", "status")):
        case "template":
            spec["workers"]["template"] = rng.choice(TEMPLATES)
        case "spec":
            broken = rng.choice(SPECS)
            spec = {**spec, **broken} if isinstance(broken, dict) and broken else broken
        case _:
            return {"spec": spec}, rng.choice(STATUSES)
    return {"spec": spec}, None
