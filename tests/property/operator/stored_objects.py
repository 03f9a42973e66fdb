"""Malformed objects of every watched kind, stored without any check, beside a job that must be admitted and healed.

The names and owners of objects are right, as every API server sees to; anything else of them may be anything.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from polyreme_api import labels
from polyreme_api.data_report import ANNOTATION_DATA, DataState, data_digest
from polyreme_api.job import TrainingJobSpec
from polyreme_api.progress import ProgressRecord
from polyreme_cluster.port import STATUS_SUBRESOURCE, AlreadyExistsError, Manifest, NotFoundError, ObjectRef
from polyreme_operator.settings import Settings
from polyreme_operator.types.intents import INTENTS_KEY
from tests.unit.operator.operator_scenes import DEVICE, admitted, job, job_manifest
from tests.unit.operator.operator_stage import Stage

KINDS = ("TrainingJob", "TrainingQueue", "ClusterTopology", "PriorityClass", "Pod", "Node", "Lease", "ConfigMap")
GOOD = "good.example/device"
"""Devices that only the healthy job's nodes have."""
APART = 37
PATIENCE_S = 120.0
POLL_S = 0.5

JUNK: st.SearchStrategy[Any] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=8)
    | st.sampled_from(
        ("", "x", "-1", "1e999999", "9" * 40, "True", "2024-01-01T00:00:00Z", "9999-12-31T23:59:59Z", "Ki")
    ),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Mutation:
    """A change at one place of an object."""

    place: int
    """Which, modulo how many there are."""
    how: str
    junk: Any


MUTATIONS = st.lists(
    st.builds(
        Mutation,
        place=st.integers(0, 10_000),
        how=st.sampled_from(("replace", "replace", "replace", "remove", "wrap", "add")),
        junk=JUNK,
    ),
    min_size=1,
    max_size=3,
)
Generated = list[Mutation]


def generate(count: int, *, seed: int | None) -> list[Generated]:
    """Let hypothesis generate so many; without a seed they are the same each time."""
    found: list[Generated] = []

    @settings(
        max_examples=count,
        derandomize=seed is None,
        database=None,
        deadline=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(MUTATIONS)
    def take(mutations: Generated) -> None:
        found.append(mutations)

    if seed is not None:
        from hypothesis import seed as seeded

        take = seeded(seed)(take)
    take()
    return found


def mutated(part: Manifest, mutations: Generated) -> Manifest:
    """Return a part of an object with changes at some of its places."""
    result: Manifest = {"part": copy.deepcopy(part)}
    for mutation in mutations:
        places = list(_places(result["part"], result, "part"))
        owner, key = places[mutation.place % len(places)]
        _change(owner, key, mutation)
        result.setdefault("part", {})
    return result["part"] if isinstance(result["part"], dict) else {"spec": result["part"]}


def _places(value: Any, owner: Any, key: Any) -> Iterator[tuple[Any, Any]]:
    if key != "part":
        yield owner, key
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for inner_key, inner in list(items):
        yield from _places(inner, value, inner_key)
    if key == "part" and not (isinstance(value, dict | list) and value):
        yield owner, key


def _change(owner: Any, key: Any, mutation: Mutation) -> None:
    junk = copy.deepcopy(mutation.junk)
    match mutation.how:
        case "remove":
            del owner[key]
        case "wrap":
            owner[key] = [owner[key], junk]
        case "add" if isinstance(owner[key], dict):
            owner[key][str(mutation.place)] = junk
        case "add" if isinstance(owner[key], list):
            owner[key].append(junk)
        case _:
            owner[key] = junk


# -------------------------------------------------------------------------------------------------- what is malformed


def job_parts() -> Manifest:
    """Spec and status of a job that was admitted, with as many fields as one has."""
    body = {
        "nodeSelector": {"team": "vision"},
        "tolerations": [{"key": "team", "operator": "Equal", "value": "vision", "effect": "NoSchedule"}],
        "affinity": {
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [
                        {"matchExpressions": [{"key": "team", "operator": "In", "values": ["vision"]}]},
                        {"matchFields": [{"key": "metadata.name", "operator": "In", "values": ["bad-0"]}]},
                    ]
                }
            }
        },
        "initContainers": [{"name": "i", "resources": {"requests": {"cpu": "1"}}, "restartPolicy": "Always"}],
        "containers": [{"name": "c", "env": [{"name": "A", "value": "1"}], "resources": {"limits": {"cpu": "500m"}}}],
        "overhead": {"memory": "1Gi"},
        "volumes": [{"name": "v", "emptyDir": {}}],
    }
    workers = {"replicas": 1, "devices": 1, "template": {"metadata": {"labels": {"a": "b"}}, "spec": body}}
    spec = {**job_manifest()["spec"], "workers": workers, "topology": {"preferred": "rack"}, "priority": 1}
    status = admitted(job(replicas=1), ("bad-0",)).status
    return {"spec": spec, "status": status.model_dump(mode="json", by_alias=True, exclude_none=True)}


QUEUE = {
    "spec": {
        "parent": "",
        "quotas": [{"resource": DEVICE, "nominal": 4}],
        "weight": 1,
        "stopPolicy": "None",
        "agingSeconds": 10,
        "fairSharing": {"halfLifeSeconds": 10},
        "preemption": {"withinQueue": "LowerPriority", "reclaim": "Any", "maxPerJob": 2},
    },
    "status": {"decayed": [{"resource": DEVICE, "seconds": "1.5"}], "decayedAt": "2023-11-14T22:00:00Z", "pending": 1},
}
TOPOLOGY = {"spec": {"levels": [{"name": "rack", "nodeLabel": "rack", "distance": 2}]}, "status": {"nodes": 1}}
POD = {
    "metadata": {"labels": {"a": "b"}},
    "spec": {
        "nodeName": "bad-0",
        "schedulerName": "s",
        "containers": [{"name": "c", "resources": {"requests": {"cpu": "1", DEVICE: "1"}}}],
        "affinity": job_parts()["spec"]["workers"]["template"]["spec"]["affinity"],
    },
    "status": {
        "phase": "Running",
        "reason": "r",
        "conditions": [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "full"}],
        "containerStatuses": [{"state": {"terminated": {"exitCode": 1, "message": "m"}}}],
    },
}
NODE = {
    "metadata": {"labels": {"team": "vision", "rack": "r0"}, "annotations": {f"{labels.GROUP}/risk": "0.5"}},
    "spec": {"unschedulable": False, "taints": [{"key": "team", "value": "vision", "effect": "NoSchedule"}]},
    "status": {
        "capacity": {DEVICE: "1"},
        "allocatable": {DEVICE: "1", "cpu": "4", "memory": "8Gi"},
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": "2023-11-14T22:00:00Z"}],
    },
}
RECORD = ProgressRecord.model_validate(
    {"attempt": 1, "phase": "Training", "step": 5, "released": True, "joined": 1, "exits": [{"rank": 0, "signal": 9}]}
).model_dump(mode="json", by_alias=True)
REPORT = {
    "state": "Processing",
    "about": data_digest(TrainingJobSpec.model_validate(job_manifest()["spec"])),
    "progress": [{"operation": "decode", "done": 400, "total": 1000}],
    "message": "m",
}
INTENT = {"namespace": "default", "name": "j", "uid": "u", "attempt": 1, "cancelledAdmissions": 0}


class Flood:
    """Stores the generated objects, batch by batch, and plays a healthy job's life beside each batch."""

    def __init__(self, generated: list[Generated], *, batch: int) -> None:
        self._generated, self._batch = generated, batch
        self.stored = dict.fromkeys(KINDS, 0)
        self._refs: list[ObjectRef] = []
        self.healthy = 0
        """Jobs that were admitted, healed and ended well beside malformed objects."""
        self.stage = Stage(Settings(retry_max_s=5.0, relist_s=60.0, data_gate=True))

    def run(self) -> None:
        """Play to the end; the operator must live, and every healthy job must end well."""
        for name in ("good-0", "good-1"):
            ready = {"allocatable": {GOOD: "1"}, "conditions": [{"type": "Ready", "status": "True"}]}
            self.stage.store.create(
                {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}, "spec": {}, "status": ready}
            )
        self.stage.store.create(_object("TrainingQueue", "good", {"spec": {}}))
        self.stage.run(self._story)

    async def _story(self) -> None:
        count = len(self._generated)
        parts = job_parts()
        for first in range(0, count, self._batch):
            batch = range(first, min(first + self._batch, count))
            for at in batch:
                self._store(at, parts)
            await asyncio.sleep(1.0)
            await self._live(f"fine-{first}")
            self._clear()
            await asyncio.sleep(1.0)

    def _clear(self) -> None:
        """Delete what was stored, owned objects first."""
        for ref in reversed(self._refs):
            with contextlib.suppress(NotFoundError):
                if ref.kind == "Pod":
                    self.stage.store.change(ref, {"status": {"phase": "Failed"}}, subresource=STATUS_SUBRESOURCE)
                self.stage.store.delete(ref, uid=None)
        self._refs.clear()

    def _store(self, at: int, parts: Manifest) -> None:
        """Store one object of each kind: each change of an object is one of another object of another kind."""
        count = len(self._generated)
        of = {kind: self._generated[(at + APART * nth) % count] for nth, kind in enumerate(KINDS)}
        spec = {**parts["spec"], "queueName": f"q-{at}" if at % 3 else "good"}
        whole = {**parts, "spec": spec} if at % 2 else {"spec": spec}
        report = json.dumps(mutated({"report": REPORT}, of["Lease"]).get("report"))
        noted = {"annotations": {ANNOTATION_DATA: report[at % 5 :] if at % 7 == 0 else report}}
        uid = self._put("TrainingJob", f"j-{at}", mutated(whole, of["TrainingJob"]), metadata=noted)
        self._put("TrainingQueue", f"q-{at}", mutated(QUEUE, of["TrainingQueue"]))
        self._remove_topology()
        self._put("ClusterTopology", "default", mutated(TOPOLOGY, of["ClusterTopology"]))
        self._put("PriorityClass", f"p-{at}", mutated({"value": 5, "globalDefault": False}, of["PriorityClass"]))
        owner = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_JOB,
            "name": f"j-{at}",
            "uid": uid,
            "controller": True,
        }
        tags = {
            labels.LABEL_JOB: f"j-{at}",
            labels.LABEL_JOB_UID: uid,
            labels.LABEL_INDEX: "0",
            labels.LABEL_REPLACEMENT: "0",
        }
        pod = labels.pod_name(f"j-{at}", uid, index=0, replacement=0)
        owned = {"labels": tags, "ownerReferences": [owner]}
        self._put("Pod", pod if at % 2 else f"other-{at}", mutated(POD, of["Pod"]), metadata=owned if at % 2 else {})
        self._put("Node", f"bad-{at}", mutated(NODE, of["Node"]) if at % 4 else NODE)
        if at % 4 == 0:
            self._put("Node", f"worse-{at}", mutated(NODE, of["Node"]))
        lease = mutated({"record": RECORD, "spec": {"leaseDurationSeconds": 10}}, of["Lease"])
        annotations = {labels.ANNOTATION_PROGRESS: json.dumps(lease.get("record"))}
        metadata = {"labels": tags, "annotations": annotations, "ownerReferences": [owner]}
        self._put("Lease", labels.job_object_name(f"j-{at}", uid), {"spec": lease.get("spec")}, metadata=metadata)
        intents = mutated({"rows": [INTENT, {**INTENT, "uid": uid}]}, of["ConfigMap"])
        self._put_intents(json.dumps(intents.get("rows")))

    def _put(self, kind: str, name: str, given: Manifest, *, metadata: Manifest | None = None) -> str:
        """Store an object, and its status after it; return its UID."""
        made = _object(kind, name, given)
        made["metadata"] |= metadata or {}
        try:
            uid = str(self.stage.store.create(made)["metadata"]["uid"])
        except AlreadyExistsError:
            return ""
        if kind not in {"Node", "Lease", "PriorityClass"} and "status" in given:
            self.stage.store.change(ObjectRef.of(made), {"status": given["status"]}, subresource=STATUS_SUBRESOURCE)
        self.stored[kind] += 1
        self._refs.append(ObjectRef.of(made))
        return uid

    def _put_intents(self, text: str) -> None:
        ref = ObjectRef(kind="ConfigMap", namespace="polyreme-system", name=labels.INTENTS_NAME)
        try:
            self.stage.store.change(ref, {"data": {INTENTS_KEY: text}})
            self.stored["ConfigMap"] += 1
        except NotFoundError:
            self._put("ConfigMap", ref.name, {"data": {INTENTS_KEY: text}}, metadata={"namespace": ref.namespace})

    def _remove_topology(self) -> None:
        with contextlib.suppress(NotFoundError):
            self.stage.store.delete(ObjectRef(kind="ClusterTopology", name="default"), uid=None)

    async def _live(self, name: str) -> None:
        """Let a healthy job be admitted, lose a rank, go on and end well."""
        # A topology that can be read may ask for labels that no node has: then nothing is placed, and rightly so.
        self._remove_topology()
        uid = self.stage.add_job(name, queueName="good", workers={"deviceResource": GOOD})
        self.stage.report_data(name, DataState.PROCESSED)
        await self._until(lambda: self.stage.status(name).get("replicas") == 1, f"{name} has its pod", name)
        await self.stage.report(name, uid, attempt=1, phase="Training", step=5)
        killed = [{"rank": 0, "signal": 9}]
        await self.stage.report(name, uid, attempt=1, phase="Training", step=6, exits=killed)
        await self._until(lambda: self.stage.status(name)["attempt"]["number"] == 2, f"{name} is healed", name)
        await self.stage.report(name, uid, attempt=2, phase="Done", step=1000, outcome="Succeeded")
        await self._until(lambda: bool(self.stage.condition(name, "Succeeded")), f"{name} ends well", name)
        pod = ObjectRef(kind="Pod", namespace="default", name=labels.pod_name(name, uid, index=0, replacement=0))
        self.stage.store.change(pod, {"status": {"phase": "Succeeded"}}, subresource=STATUS_SUBRESOURCE)
        self.healthy += 1

    async def _until(self, holds: Callable[[], bool], what: str, name: str) -> None:
        deadline_s = self.stage.clock.steady_s() + PATIENCE_S
        while not holds():
            assert self.stage.clock.steady_s() < deadline_s, f"never: {what}; {self.stage.status(name)}"
            await asyncio.sleep(POLL_S)


def _object(kind: str, name: str, given: Manifest) -> Manifest:
    """Return an object with a right identity; of its own metadata only what text may be is kept."""
    own = given.get("metadata") if isinstance(given.get("metadata"), dict) else {}
    tags = {part: _texts((own or {}).get(part)) for part in ("labels", "annotations")}
    metadata: Manifest = {"name": name, **{part: texts for part, texts in tags.items() if texts}}
    if kind in {"TrainingJob", "Pod", "Lease"}:
        metadata["namespace"] = "default"
    ours = kind in {"TrainingJob", "TrainingQueue", "ClusterTopology"}
    head = {"apiVersion": labels.API_VERSION if ours else "v1", "kind": kind}
    parts = {key: part for key, part in given.items() if key not in {"kind", "apiVersion"}}
    return {**parts, **head, "metadata": metadata}


def _texts(given: Any) -> dict[str, str]:
    return {key: str(value) for key, value in given.items() if key} if isinstance(given, dict) else {}
