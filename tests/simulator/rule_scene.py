"""Scenes in a world whose status writes a test makes itself, for the tests of the simulator's rules."""

from __future__ import annotations

import asyncio
import json
import random
from typing import Any

from polyreme_api import labels
from polyreme_api.job.placement import Placement
from polyreme_api.job.status import AttemptStatus
from polyreme_api.times import rfc3339
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_operator.types.intents import INTENTS_KEY
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.quotas import queue_manifest
from polyreme_simulator.waiting import FOLLOWS_S, LOOK_S
from polyreme_simulator.world import World

SETTLED_S = 100.0
"""Faults ended so long ago that the operator knows what is."""
ONE_EACH = {"replicas": 1, "devices": 1}
A_TIME = "2023-11-14T22:15:25.987654Z"
TWO_DEVICES = {"replicas": 1, "devices": 2}


class Scene:
    """A world whose status writes a test makes itself."""

    def __init__(self) -> None:
        self.loop, self.facts = VirtualLoop(), Facts()
        self.world = World(self.loop, random.Random(1), self.facts)
        self.world.faulty, self.world.calm_since_s = False, -SETTLED_S

    def wait(self, for_s: float) -> None:
        self.loop.run_until_complete(asyncio.sleep(for_s))

    def job(self, name: str, **spec: Any) -> Manifest:
        spec = {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 8, "packsPerStep": 4},
            "workers": ONE_EACH,
            **spec,
        }
        head = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_JOB}
        return self.world.store.create({**head, "metadata": {"name": name, "namespace": "default"}, "spec": spec})

    def say(self, job: Manifest, **status: Any) -> None:
        """Write a job's status; conditions are given by name, with their reason, those that do not hold with a "!"."""
        conditions = [
            {
                "type": kind,
                "status": "False" if reason.startswith("!") else "True",
                "reason": reason.removeprefix("!"),
                "lastTransitionTime": self.now(),
            }
            for kind, reason in status.pop("conditions", {}).items()
        ]
        patch = {"status": {**status, "conditions": conditions}}
        self.world.store.change(ObjectRef.of(job), patch, subresource="status")

    def admit(self, job: Manifest, *nodes: str, desired: Any = "Run", attempt: int = 1) -> None:
        running = AttemptStatus(
            number=attempt,
            plan_hash="h",
            replicas=len(nodes),
            devices=job["spec"]["workers"]["devices"],
            desired=desired,
            placement=Placement.of(nodes),
        )
        dumped = running.model_dump(mode="json", by_alias=True)
        self.say(job, attempt=dumped, conditions={"Admitted": "Admitted"})

    def pod(self, job: Manifest, **fields: Any) -> Manifest:
        """Create a worker pod that no simulated scheduler looks at."""
        name, uid = job["metadata"]["name"], job["metadata"]["uid"]
        owner = {
            "apiVersion": labels.API_VERSION,
            "kind": labels.KIND_JOB,
            "name": name,
            "uid": uid,
            "controller": True,
        }
        tags = {labels.LABEL_JOB_UID: uid, labels.LABEL_INDEX: "0", labels.LABEL_REPLACEMENT: "0"}
        resources = {"limits": {labels.RESOURCE_DEVICE: str(job["spec"]["workers"]["devices"])}}
        metadata = {
            "name": f"{name}-0",
            "namespace": "default",
            "labels": {**tags, labels.LABEL_QUEUE: job["spec"].get("queueName", "default")},
            "ownerReferences": [owner],
        }
        spec = {"schedulerName": "none", "containers": [{"name": "c", "image": "i", "resources": resources}], **fields}
        return self.world.store.create({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec})

    def foreign_pod(self, node: str, *, devices: int) -> None:
        limits = {"limits": {labels.RESOURCE_DEVICE: str(devices)}}
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "foreign", "namespace": "others"}}
        self.world.store.create(pod | {"spec": {"nodeName": node, "containers": [{"resources": limits}]}})

    def intend(self, *entries: Manifest) -> None:
        """Write a batch of intents; the first call creates their object."""
        head = {"apiVersion": "v1", "kind": "ConfigMap"}
        metadata = {"name": labels.INTENTS_NAME, "namespace": "polyreme-system"}
        ref = ObjectRef(kind="ConfigMap", **metadata)
        if not list(self.world.store.records("ConfigMap")):
            self.world.store.create({**head, "metadata": metadata})
        self.world.store.change(ref, {"data": {INTENTS_KEY: json.dumps(entries)}})

    def runs(self, pod: Manifest) -> None:
        self.world.store.change(ObjectRef.of(pod), {"status": {"phase": "Running"}}, subresource="status")

    def delete(self, job: Manifest) -> None:
        self.world.store.delete(ObjectRef.of(job), uid=job["metadata"]["uid"])

    def queue(self, name: str, nominal: int) -> None:
        spec = {"quotas": [{"resource": labels.RESOURCE_DEVICE, "nominal": nominal}]}
        self.world.store.create(queue_manifest(name, spec, labels.API_VERSION))

    def now(self) -> str:
        return rfc3339(self.world.clock.now_s())

    def look(self) -> None:
        """Let the rule of pending reasons look, once nothing has changed for a while."""
        self.wait(FOLLOWS_S + LOOK_S + 0.1)
        self.facts.rules.waiting.look(self.world)

    def broken(self, rule: str) -> bool:
        return any(f" {rule}: " in violation for violation in self.facts.violations)
