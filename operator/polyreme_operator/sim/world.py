"""The simulated cluster around the real operator: store, nodes, kubelets, garbage collector, gangs of ranks."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable
from typing import Any

from polyreme_api import labels
from polyreme_api.environment import PodEnvironment
from polyreme_api.history import parse_checkpoint_name
from polyreme_api.launch.messages import Release
from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankPhase, StepRecord
from polyreme_api.times import rfc3339
from polyreme_operator.adapters.embedded.cluster import EmbeddedCluster
from polyreme_operator.adapters.embedded.record import Change
from polyreme_operator.adapters.embedded.store import Store
from polyreme_operator.port import Manifest, NotFoundError, ObjectRef, PortError, WatchEventType
from polyreme_operator.sim.eventloop import SimClock, VirtualLoop
from polyreme_operator.sim.invariants import Facts
from polyreme_operator.sim.launcher import SimLauncher
from polyreme_operator.sim.training import Gang, Root

KUBELET_S = 0.3
"""Longest time that a kubelet takes to act."""
GARBAGE_S = 1.0
NOT_READY_S = 4.0
"""Time until a silent node is marked NotReady."""
BOOT_S = 1.0
STEP_S = 0.4
COMMIT_S = 0.3
LATE_PUTS = 0.3
"""Share of a checkpoint's markers that land late while faults last, whatever became of the rank that sent them."""
LATE_PUT_S = 8.0
POLL_S = 0.5


@dataclasses.dataclass(slots=True)
class SimNode:
    """A machine."""

    name: str
    devices: int
    up: bool = True


class World:
    """Everything that is not the operator.

    Args:
        loop: Virtual time.
        rng: Every draw.
        facts: What happened, and what of it must not.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, facts: Facts) -> None:
        self.loop, self.rng, self.facts = loop, rng, facts
        self.clock = SimClock(loop)
        self.store = Store(new_uid=self._uid, now_s=self.clock.now_s, on_change=self._changed, history_changes=2000)
        self.cluster = EmbeddedCluster(self.store, collect_garbage=False)
        self.nodes: dict[str, SimNode] = {}
        self.launchers: dict[str, SimLauncher] = {}
        self.roots: dict[str, Root] = {}
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.stopping: set[tuple[str, int]] = set()
        self.faulty = True
        self.tick_lease = 0
        self.checkpoint_every: dict[str, int] = {}
        self.steps: dict[str, int] = {}

    # ------------------------------------------------------------------------------------------------------- basics

    def time_s(self) -> float:
        """Return virtual time."""
        return self.loop.time()

    def after(self, delay_s: float, act: Callable[[], Any]) -> None:
        """Do something later."""
        self.loop.call_later(max(0.0, delay_s), act)

    def soon(self, longest_s: float, act: Callable[[], Any]) -> None:
        """Do something at some time within ``longest_s``."""
        self.after(self.rng.random() * longest_s, act)

    def _uid(self) -> str:
        return f"{self.rng.getrandbits(64):016x}"

    def job(self, uid: str) -> Manifest | None:
        """Return a job by UID."""
        for record in self.store.records("TrainingJob"):
            if record.uid == uid:
                return record.manifest
        return None

    def root(self, uid: str) -> Root:
        """Return a job's checkpoint root."""
        return self.roots.setdefault(uid, Root())

    def add_node(self, name: str, devices: int) -> None:
        """Add a machine."""
        self.nodes[name] = SimNode(name=name, devices=devices)
        self.store.create(
            {
                "apiVersion": "v1",
                "kind": "Node",
                "metadata": {"name": name},
                "status": {
                    "allocatable": {labels.RESOURCE_DEVICE: str(devices)},
                    "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": self._now()}],
                },
            }
        )

    def _now(self) -> str:
        return rfc3339(self.clock.now_s())

    # ------------------------------------------------------------------------------------------- what changes set off

    def _changed(self, change: Change) -> None:
        self.facts.changed(change, self)
        manifest, kind = change.record.manifest, change.record.kind
        if kind == "Pod":
            ref, uid = ObjectRef.of(manifest), manifest["metadata"]["uid"]
            self.soon(KUBELET_S, lambda: self.sync_pod(ref, uid))
        elif kind == "TrainingJob":
            uid = manifest["metadata"]["uid"]
            for launcher in self.launchers.values():
                if launcher.alive and launcher.pod.job_uid == uid and launcher.leading is not None:
                    launcher.read_job()
        if change.type is not WatchEventType.MODIFIED:
            # Also behind what is created: a late write may create a child of a job that is gone (test_port_objects.py).
            self.soon(GARBAGE_S, self.store.collect_garbage)

    # ------------------------------------------------------------------------------------------------------- kubelets

    def sync_pod(self, ref: ObjectRef, uid: str) -> None:
        """What a pod's kubelet does about it."""
        launcher = self.launchers.get(uid)
        try:
            pod = self.store.get(ref)
        except NotFoundError:
            pod = None
        if pod is not None and pod["metadata"]["uid"] != uid:
            pod = None
        node = self.nodes[pod["spec"]["nodeName"] if pod is not None else launcher.node if launcher else "n0"]
        if pod is None:
            if launcher is not None and launcher.alive:
                launcher.zombie = launcher.zombie or not node.up
                if node.up:
                    launcher.kill()
            return
        if not node.up:
            return
        deleting = pod["metadata"].get("deletionTimestamp") is not None
        ended = (pod.get("status") or {}).get("phase") in {"Succeeded", "Failed"}
        if deleting:
            if launcher is not None and launcher.alive:
                launcher.terminate(float(pod["metadata"]["deletionGracePeriodSeconds"]))
            else:
                self.store.delete(ref, uid=uid, grace_period_s=0)
        elif launcher is None and not ended:
            self._start_pod(pod, ref, uid, node)
        elif launcher is not None and not launcher.alive and not ended:
            self._report_end(ref, uid, 137)

    def _start_pod(self, pod: Manifest, ref: ObjectRef, uid: str, node: SimNode) -> None:
        container = pod["spec"]["containers"][0]
        environment = PodEnvironment.parse({entry["name"]: entry["value"] for entry in container["env"]})
        running = [other for other in self.launchers.values() if other.alive and other.node == node.name]
        if sum(other.pod.devices for other in running) + environment.devices > node.devices:
            status = {"phase": "Failed", "reason": "OutOfDevices"}
            self.store.patch(ref, {"status": status}, subresource="status")
            return
        launcher = SimLauncher(self, environment, pod_uid=uid, node=node.name, rng=random.Random(self.rng.random()))
        self.launchers[uid] = launcher
        self.store.patch(ref, {"status": {"phase": "Running"}}, subresource="status")
        launcher.start()

    def launcher_ended(self, launcher: SimLauncher, code: int) -> None:
        """A launcher's process is gone; its kubelet says so, if it can."""
        ref = ObjectRef(kind="Pod", namespace=launcher.pod.namespace, name=launcher.pod.pod)
        self.soon(KUBELET_S, lambda: self._report_end(ref, launcher.pod_uid, code))

    def _report_end(self, ref: ObjectRef, uid: str, code: int) -> None:
        launcher = self.launchers[uid]
        if not self.nodes[launcher.node].up:
            return
        try:
            pod = self.store.get(ref)
            if pod["metadata"]["uid"] != uid:
                return
            if pod["metadata"].get("deletionTimestamp") is not None:
                self.store.delete(ref, uid=uid, grace_period_s=0)
                return
            ended = [{"name": "launcher", "state": {"terminated": {"exitCode": code}}}]
            status = {"phase": "Succeeded" if code == 0 else "Failed", "containerStatuses": ended}
            self.store.patch(ref, {"status": status}, subresource="status")
        except PortError:
            return

    def node_away(self, name: str, *, dead: bool) -> None:
        """A node is cut off; a dead one runs nothing any more."""
        node = self.nodes[name]
        if not node.up:
            return
        node.up = False
        for launcher in list(self.launchers.values()):
            if launcher.node == name and launcher.alive and dead:
                launcher.kill()

        def not_ready() -> None:
            if not node.up:
                self._say_ready(name, "Unknown")

        self.after(NOT_READY_S, not_ready)

    def node_back(self, name: str) -> None:
        """It is back, with whatever it still runs."""
        node = self.nodes[name]
        if node.up:
            return
        node.up = True
        self._say_ready(name, "True")
        for record in list(self.store.records("Pod")):
            if record.manifest["spec"].get("nodeName") == name:
                self.sync_pod(ObjectRef.of(record.manifest), record.uid)
        for launcher in list(self.launchers.values()):
            if launcher.node == name and launcher.alive:
                ref = ObjectRef(kind="Pod", namespace=launcher.pod.namespace, name=launcher.pod.pod)
                self.sync_pod(ref, launcher.pod_uid)
                if launcher.leading is not None:
                    launcher.read_job()

    def _say_ready(self, name: str, status: str) -> None:
        condition = {"type": "Ready", "status": status, "lastTransitionTime": self._now()}
        self.store.patch(
            ObjectRef(kind="Node", name=name), {"status": {"conditions": [condition]}}, subresource="status"
        )

    # -------------------------------------------------------------------------------------------------------- network

    def connected(self, one: SimLauncher, other: SimLauncher) -> bool:
        """Tell whether two processes reach each other."""
        return one.node == other.node or (self.nodes[one.node].up and self.nodes[other.node].up)

    def reaches_api(self, launcher: SimLauncher) -> bool:
        """Tell whether a process reaches the API server."""
        return self.nodes[launcher.node].up

    def leader_of(self, uid: str) -> SimLauncher | None:
        """Return the launcher to which a job's Service leads: the newest pod of index 0 that exists."""
        found = [
            launcher
            for launcher in self.launchers.values()
            if launcher.alive and launcher.pod.job_uid == uid and launcher.pod.index == 0 and self.pod_exists(launcher)
        ]
        return max(found, key=lambda launcher: launcher.pod.replacement, default=None)

    def pod_exists(self, launcher: SimLauncher) -> bool:
        """Tell whether a launcher's pod is still in the store."""
        ref = ObjectRef(kind="Pod", namespace=launcher.pod.namespace, name=launcher.pod.pod)
        try:
            return bool(self.store.get(ref)["metadata"]["uid"] == launcher.pod_uid)
        except NotFoundError:
            return False

    # ------------------------------------------------------------------------------------------------------- training

    def forked(self, launcher: SimLauncher, attempt: int, release: Release) -> None:
        """Ranks were forked: when all of them are there, they train."""
        uid = launcher.pod.job_uid
        self.facts.forked(launcher, attempt, release, self)
        known = self.facts.attempts[uid, attempt]
        gang = self.gangs.get((uid, attempt))
        if gang is None:
            durable = None if release.resume_from is None else parse_checkpoint_name(release.resume_from)
            step = 0 if durable is None else durable.step
            gang = Gang(attempt=attempt, world=known.replicas * known.devices, resumed_from=step, step=step)
            gang.durable = durable
            self.gangs[uid, attempt] = gang
        gang.ranks.update(launcher.ranks)
        if len(gang.ranks) == gang.world:
            self.soon(BOOT_S, lambda: self._train(uid, gang))

    def _train(self, uid: str, gang: Gang) -> None:
        if not gang.whole:
            if gang.live and all(rank.alive for rank in gang.ranks.values()):
                self.after(POLL_S, lambda: self._train(uid, gang))
            return
        stop = (uid, gang.attempt) in self.stopping
        if stop or gang.step >= self.steps[uid]:
            self._commit(uid, gang, gang.step, then=lambda: self._end(uid, gang, 75 if stop else 0))
            return
        gang.step += 1
        self.root(uid).steps.setdefault(gang.attempt, []).append(
            StepRecord(attempt=gang.attempt, step=gang.step, loss=1.0 / gang.step)
        )
        self._report(uid, gang, RankPhase.TRAINING)
        if gang.step % self.checkpoint_every[uid] == 0:
            self._commit(uid, gang, gang.step)
        self.after(STEP_S * (0.5 + self.rng.random()), lambda: self._train(uid, gang))

    def _commit(self, uid: str, gang: Gang, step: int, then: Callable[[], None] | None = None) -> None:
        """Commit a checkpoint a little later; a stopped rank 0 commits when it goes on, however late."""
        rank, reference = gang.ranks[0], CheckpointRef(attempt=gang.attempt, step=step)

        def write() -> None:
            if rank.stopped:
                self.after(POLL_S, write)
            elif rank.alive:
                late = self.faulty and self.rng.random() < LATE_PUTS
                self.after(LATE_PUT_S * self.rng.random() if late else 0.0, land)

        def land() -> None:
            if step > gang.resumed_from:
                self.root(uid).commit(reference)
            tell()

        def tell() -> None:
            if rank.stopped:
                self.after(POLL_S, tell)
            elif rank.alive:
                if step > gang.resumed_from and (gang.durable is None or gang.durable.step < step):
                    gang.durable = reference
                self._report(uid, gang, RankPhase.TRAINING)
                if then is not None:
                    then()

        self.soon(COMMIT_S, write)

    def _end(self, uid: str, gang: Gang, code: int) -> None:
        if not gang.whole:
            if all(rank.alive for rank in gang.ranks.values()):
                self.after(POLL_S, lambda: self._end(uid, gang, code))
            return
        if code == 0:
            self._report(uid, gang, RankPhase.DONE)
        for rank in gang.ranks.values():
            self.soon(COMMIT_S, lambda rank=rank: rank.end(code=code))  # type: ignore[misc]

    def _report(self, uid: str, gang: Gang, phase: RankPhase) -> None:
        if gang.done:
            return
        gang.done = phase is RankPhase.DONE
        record = ProgressRecord(
            attempt=gang.attempt,
            phase=phase,
            step=gang.step,
            steps=self.steps[uid],
            step_seconds=STEP_S,
            checkpoint=gang.durable,
            outcome=Outcome.SUCCEEDED if phase is RankPhase.DONE else None,
        )
        for launcher in self.launchers.values():
            if launcher.alive and launcher.pod.job_uid == uid and launcher.ranks.get(0) is gang.ranks[0]:
                launcher.report(record)

    def signal_gang(self, uid: str, attempt: int, *, stop: bool) -> None:
        """Ranks were asked to checkpoint, and to stop if ``stop``."""
        gang = self.gangs.get((uid, attempt))
        if gang is not None and stop:
            self.stopping.add((uid, attempt))
