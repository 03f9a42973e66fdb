"""Anomalies that users, webhooks and machines cause: one class in two seeds of five, none in the others.

Writes that are refused for good, full quotas of the objects of jobs, stepped clocks, deleted children, objects that
break their schemas, labels copied from a job, Node objects that are gone for a second, records that another account
writes on a job's Lease, jobs that no queue accepts. They draw from a generator of their own, so that seeds without
them do not change.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from polyreme_api import labels
from polyreme_api.progress import Outcome, ProgressRecord, RankExit, RankPhase
from polyreme_cluster.port import Manifest, ObjectRef, PortError
from polyreme_simulator.anomaly_facts import OWNED_KINDS
from polyreme_simulator.event_loop import SimClock
from polyreme_simulator.foreign_queues import ForeignQueues
from polyreme_simulator.forgeries import Forger
from polyreme_simulator.malformed import draw_malformed
from polyreme_simulator.ownership import is_set_apart, owner_uid
from polyreme_simulator.profiles import PROFILES
from polyreme_simulator.refused_children import KINDS as CHILD_KINDS
from polyreme_simulator.scenario import NAMESPACES
from polyreme_simulator.world import World

CLASSES = (
    "write refused",
    "child deleted",
    "foreign labels",
    "node flaps",
    "malformed object",
    "clock steps",
    "refused children",
    "forged records",
    "foreign queues",
)
IN_TURN = CLASSES[:-1]
"""Those of the seeds that take turns. The last has seeds of its own, so that the others keep theirs."""
EVENTS = (4, 6, 10)
"""How often it happens while faults last."""
CALM_EVENTS = 3
FLAP_S = (0.3, 1.0, 1.5)
STEPS_S = (-3600.0, -3600.0, -45.0, 45.0, 45.0, 3600.0)
FOREIGN_S = (5.0, 20.0, 60.0)
REFUSALS_MAX = 2
REFUSED = ("create Pod", "create Pod", "create Service", "patch TrainingJob", "patch TrainingJob")
SEEDS_PER_CLASS = 5
"""Of so many seeds, one after the other, two have an anomaly."""
WITH_ONE = frozenset({2, 4})
FOREIGN_EVERY, FOREIGN_AT = 25, 10
"""One seed of so many has foreign queues, and which."""


def class_of(seed: int) -> str:
    """Return the class of a seed's anomalies; empty for most seeds."""
    turn, at = divmod(seed, SEEDS_PER_CLASS)
    # Shifted after each round of the sixteen profiles, so that each class meets each of them.
    turned = 2 * turn + (at == 4) + seed // (SEEDS_PER_CLASS * len(PROFILES))
    if seed % FOREIGN_EVERY == FOREIGN_AT:
        return "foreign queues"
    return IN_TURN[turned % len(IN_TURN)] if at in WITH_ONE else ""


class Anomalies:
    """Draws and makes them.

    Args:
        world: The cluster.
        kind: Which class; empty for none.
        clocks: The clocks of the machines that run the operator's replicas.
        rng: Every draw.
        reached: Counts what came about.
    """

    def __init__(
        self, world: World, kind: str, clocks: list[SimClock], rng: random.Random, reached: Counter[tuple[str, str]]
    ) -> None:
        self._world, self.kind, self._clocks = world, kind, clocks
        self._rng, self._reached = rng, reached
        self._count = 0
        self._forger, self._foreign = Forger(world, rng), ForeignQueues(world, rng)
        acts: dict[str, Callable[[], bool]] = {
            "write refused": self._refuse,
            "child deleted": self._delete_child,
            "foreign labels": self._use_labels,
            "node flaps": self._flap,
            "malformed object": self._store_malformed,
            "clock steps": self._step_clock,
            "refused children": self._refuse_children,
            "forged records": self._forger.forge,
            "foreign queues": self._submit_foreign,
        }
        self._act = acts.get(kind)

    def begin(self, lasts_s: float) -> None:
        """Plan those of the time of faults."""
        if self.kind == "forged records":
            self._forger.listen()
        if self.kind == "foreign queues":
            self._foreign.begin()
        if self._act is not None:
            for _ in range(self._rng.choice(EVENTS)):
                self._world.after(1.0 + self._rng.random() * (lasts_s - 2.0), self._do)

    def calm(self, within_s: float) -> None:
        """Plan those of the calm period after the faults, in which nothing else goes wrong."""
        if self._act is not None:
            for _ in range(CALM_EVENTS):
                self._world.soon(within_s, self._do)

    def _do(self) -> None:
        assert self._act is not None, "planned only for seeds with a class"
        if self._act():
            self._reached[self.kind, ""] += 1

    def _jobs(self) -> list[Manifest]:
        found = [record.manifest for record in self._world.store.records(labels.KIND_JOB)]
        return [job for job in found if not is_set_apart(job)]

    def _pick(self, found: list[Manifest]) -> Manifest | None:
        return self._rng.choice(found) if found else None

    # --------------------------------------------------------------------------------------------------------- writes

    def _refuse(self) -> bool:
        """An admission webhook, or a missing right, refuses some writes of one job, for a while or for good."""
        facts = self._world.facts.rules.anomalies
        if len(facts.refusals) >= REFUSALS_MAX:
            return False
        point = self._rng.choice(REFUSED)
        waiting = [job for job in self._jobs() if "attempt" not in (job.get("status") or {})]
        job = self._pick(waiting if point == "patch TrainingJob" else self._jobs())
        if job is None:
            return False
        self._count += 1
        uid, name = job["metadata"]["uid"], job["metadata"]["name"]
        sentence = f"{self._rng.choice(('403 Forbidden', '422 Invalid'))}: policy {self._count} refuses {name}"
        facts.refuse(uid, point, sentence, self._world)
        if self._rng.random() < 0.5:
            self._world.after(self._rng.choice(FOREIGN_S), lambda: facts.allow(uid, point))
        return True

    def _refuse_children(self) -> bool:
        """A quota of a namespace is full for some objects of jobs, for a while or for good.

        Someone may have deleted such an object of a job before, whose next pod needs it.
        """
        facts, self._count = self._world.facts.rules.anomalies.children, self._count + 1
        namespace = self._rng.choice(NAMESPACES)
        kinds = self._rng.sample(CHILD_KINDS, self._rng.choice((1, 1, 2)))
        for_good, lasts_s = self._rng.random() < 0.2, self._rng.choice(FOREIGN_S)
        for kind in kinds:
            sentence = f"403 Forbidden: exceeded quota: quota-{self._count}, requested: count/{kind}=1"
            facts.refuse(namespace, kind, sentence)
            if not for_good:
                self._world.after(lasts_s, functools.partial(facts.allow, namespace, kind, sentence))
            if self._rng.random() < 0.5:
                self._start_without(namespace, kind)
        return True

    def _start_without(self, namespace: str, kind: str) -> None:
        """Delete a job's object of a kind, and a pod of the job."""
        found = [record.manifest for record in self._world.store.records(kind)]
        owned = [each for each in found if owner_uid(each) and each["metadata"]["namespace"] == namespace]
        if (gone := self._pick(owned)) is not None and self._delete(gone):
            pods = [record.manifest for record in self._world.store.records("Pod")]
            pod = self._pick([each for each in pods if owner_uid(each) == owner_uid(gone)])
            if pod is not None:
                self._delete(pod)

    # -------------------------------------------------------------------------------------------------------- objects

    def _delete_child(self) -> bool:
        """Delete an object that a job owns, or the intents."""
        found = [record.manifest for kind in OWNED_KINDS for record in self._world.store.records(kind)]
        owned = [manifest for manifest in found if owner_uid(manifest)]
        intents = [record.manifest for record in self._world.store.records("ConfigMap")]
        gone = self._pick(intents if intents and self._rng.random() < 0.4 else owned)
        return gone is not None and self._delete(gone)

    def _use_labels(self) -> bool:
        """A user copies the labels of a job onto objects of their own."""
        job = self._pick(self._jobs())
        if job is None:
            return False
        make = self._rng.choice((self._foreign_lease, self._foreign_pod, self._unbound_pod))
        made = make(job)
        self._world.after(self._rng.choice(FOREIGN_S), lambda: self._delete(made))
        return True

    def _labels(self, job: Manifest) -> dict[str, str]:
        return {
            labels.LABEL_JOB: job["metadata"]["name"],
            labels.LABEL_JOB_UID: job["metadata"]["uid"],
            labels.LABEL_QUEUE: job["spec"].get("queueName", "default"),
            labels.LABEL_INDEX: "0",
            labels.LABEL_REPLACEMENT: "0",
        }

    def _foreign_lease(self, job: Manifest) -> Manifest:
        attempt = ((job.get("status") or {}).get("attempt") or {}).get("number", 1)
        success = {"phase": RankPhase.DONE, "outcome": Outcome.SUCCEEDED}
        failure = {"exits": [RankExit(rank=0, signal=9)]}
        record = ProgressRecord(attempt=attempt, step=9, released=True, **self._rng.choice((success, failure)))
        text = record.model_dump_json(by_alias=True, exclude_defaults=True)
        body = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "spec": {"leaseDurationSeconds": 10}}
        return self._create(body, labels=self._labels(job), annotations={labels.ANNOTATION_PROGRESS: text})

    def _foreign_pod(self, job: Manifest) -> Manifest:
        """A pod of the job's labels that failed, in the job's namespace or in another."""
        pod = self._create(_pod(node=self._rng.choice(sorted(self._world.nodes))), labels=self._labels(job))
        status = {"phase": "Failed", "containerStatuses": [{"name": "c", "state": {"terminated": {"exitCode": 1}}}]}
        self._world.store.change(ObjectRef.of(pod), {"status": status}, subresource="status")
        return pod

    def _unbound_pod(self, job: Manifest) -> Manifest:
        """A pod that no scheduler binds, of a job that does not exist."""
        invented = {labels.LABEL_JOB_UID: f"{self._rng.getrandbits(64):016x}"}
        pod = _pod()
        pod["spec"]["schedulerName"] = "nobody"
        return self._create(pod, labels=self._labels(job) | invented)

    def _create(self, body: Manifest, **metadata: Any) -> Manifest:
        self._count += 1
        namespace = self._rng.choice(("default", "others"))
        named = {"name": f"foreign-labels-{self._count}", "namespace": namespace, **metadata}
        return self._world.store.create({**body, "metadata": named})

    def _submit_foreign(self) -> bool:
        """Someone submits a job to a queue that does not accept it."""
        like = self._pick(self._jobs())
        return like is not None and self._foreign.submit(like)

    def _store_malformed(self) -> bool:
        self._count += 1
        nodes = sorted(name for name, node in self._world.nodes.items() if node.present)
        manifest, status = draw_malformed(self._rng, number=self._count, nodes=nodes)
        ref = ObjectRef.of(self._world.store.create(manifest))
        if status is not None:
            self._world.store.change(ref, {"status": status}, subresource="status")
        return True

    def _delete(self, manifest: Manifest) -> bool:
        try:
            self._world.store.delete(ObjectRef.of(manifest), uid=manifest["metadata"]["uid"])
        except PortError:
            return False
        return True

    # ----------------------------------------------------------------------------------------------- machines, clocks

    def _flap(self) -> bool:
        """A Node object is deleted, and its kubelet registers it again: the machine never stopped."""
        names = [name for name, node in self._world.nodes.items() if node.present and node.up]
        if not names:
            return False
        self._world.machines.flap(self._rng.choice(names), self._rng.choice(FLAP_S))
        return True

    def _step_clock(self) -> bool:
        """The clocks of the machines that run the operator are stepped."""
        by_s = self._rng.choice(STEPS_S)
        for clock in self._clocks:
            clock.step_wall(by_s)
        return True


def _pod(*, node: str = "") -> Manifest:
    resources = {"limits": {labels.RESOURCE_DEVICE: "1"}}
    spec: dict[str, Any] = {"containers": [{"name": "c", "image": "i", "resources": resources}]}
    if node:
        spec["nodeName"] = node
    return {"apiVersion": "v1", "kind": "Pod", "spec": spec}
