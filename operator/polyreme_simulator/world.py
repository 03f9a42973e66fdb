"""The simulated cluster around the real operator: store, kubelets, scheduler, garbage collector, gangs of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from polyreme_api.environment import PodEnvironment
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, WatchEventType
from polyreme_launcher.protocol.messages import Release
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.record import Change
from polyreme_local.api_server.schema import SCHEMAS
from polyreme_local.api_server.store import Store
from polyreme_simulator.cluster_view import LauncherView
from polyreme_simulator.event_loop import SimClock, VirtualLoop
from polyreme_simulator.gang_training import GangTraining
from polyreme_simulator.invariants import Facts
from polyreme_simulator.kubelets import KUBELET_S, Kubelets
from polyreme_simulator.launcher import SimLauncher
from polyreme_simulator.machines import Machines
from polyreme_simulator.nodes import SimNode, takes_pods
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.profiles import MIXED, Profile
from polyreme_simulator.refused_children import exists_child
from polyreme_simulator.scheduler import KubeScheduler
from polyreme_simulator.training import Gang, Root

GARBAGE_S = 1.0


class World:
    """The simulated cluster: everything but the operator.

    Args:
        loop: Virtual time.
        rng: Every draw.
        facts: What happened, and what of it must not.
        profile: What it is about.
    """

    def __init__(self, loop: VirtualLoop, rng: random.Random, facts: Facts, *, profile: Profile = MIXED) -> None:
        self.loop, self.rng, self.facts, self.profile = loop, rng, facts, profile
        self.clock = SimClock(loop)
        self.store = Store(
            new_uid=self._uid,
            now_s=self.clock.now_s,
            validators={kind: _relaxed(check) for kind, check in SCHEMAS.items()},
            on_change=self._changed,
            history_changes=2000,
        )
        self.cluster = EmbeddedCluster(self.store, collect_garbage=False)
        self.kubelets = Kubelets(self)
        self.machines = Machines(self, self.kubelets)
        self.scheduler = KubeScheduler(self)
        self.launchers: dict[str, SimLauncher] = {}
        self.training = GangTraining(self)
        self.faulty = True
        self.launcher_rbac = False
        """Whether launchers need Roles to read their job."""
        self.calm_since_s = 0.0
        """When the faults ended."""

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
        return self.training.root(uid)

    @property
    def gangs(self) -> dict[tuple[str, int], Gang]:
        """Gangs by UID of the job and attempt."""
        return self.training.gangs

    @property
    def steps(self) -> dict[str, int]:
        """Steps that each job trains, by UID."""
        return self.training.steps

    @property
    def reached(self) -> Counter[tuple[str, str]]:
        """How often each fault or situation came about."""
        return self.facts.reached

    @property
    def nodes(self) -> dict[str, SimNode]:
        """Machines by name, those that are gone too."""
        return self.machines.nodes

    @property
    def lost_s(self) -> dict[str, float]:
        """When each machine was last away, or marked as out of service."""
        return self.machines.lost_s

    def add_node(self, name: str, devices: int, *, tags: dict[str, str] | None = None, owned: bool = False) -> None:
        """Add a machine."""
        self.machines.add(SimNode(name=name, devices=devices, labels=tags or {}), owned=owned)

    def node_object(self, name: str) -> Manifest:
        """Return a machine's Node object, for looking at it only."""
        return self.store.shown(ObjectRef(kind="Node", name=name))

    def usable(self, name: str) -> bool:
        """Tell whether new pods may go to a machine, as far as its Node object says."""
        return takes_pods(self.node_object(name))

    # ------------------------------------------------------------------------------------------- what changes set off

    def _changed(self, change: Change) -> None:
        self.facts.changed(change, self)
        manifest, kind = change.record.manifest, change.record.kind
        if is_set_apart(manifest):
            return
        if kind == "Pod":
            ref, uid = ObjectRef.of(manifest), manifest["metadata"]["uid"]
            self.soon(KUBELET_S, lambda: self.kubelets.sync(ref, uid))
            self.scheduler.look_soon()
        elif kind == "Node":
            self.scheduler.look_soon()
        elif kind == "TrainingJob":
            uid = manifest["metadata"]["uid"]
            for launcher in self.launchers.values():
                if launcher.alive and launcher.pod.job_uid == uid and launcher.leading is not None:
                    launcher.leading.read_job()
        if change.type is not WatchEventType.MODIFIED:
            # After creations, too: a late write may create a child of a job that is gone (test_port_objects.py).
            self.soon(GARBAGE_S, self.store.collect_garbage)

    # -------------------------------------------------------------------------------------------------------- network

    def connected(self, one: LauncherView, other: LauncherView) -> bool:
        """Tell whether two processes reach each other."""
        return one.node == other.node or (self.nodes[one.node].up and self.nodes[other.node].up)

    def reaches_api(self, launcher: LauncherView) -> bool:
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
        try:
            return bool(self.store.shown(launcher.ref)["metadata"]["uid"] == launcher.pod_uid)
        except NotFoundError:
            return False

    def has_child(self, pod: PodEnvironment, kind: str) -> bool:
        """Tell whether an object exists that a job's pods need; Roles are needed only where they are created."""
        if kind in {"Role", "RoleBinding"} and not self.launcher_rbac:
            return True
        return exists_child(self, {"name": pod.job, "uid": pod.job_uid, "namespace": pod.namespace}, kind)

    def forked(self, launcher: SimLauncher, attempt: int, release: Release) -> None:
        """Ranks were forked: they train when all of them are there."""
        self.training.forked(launcher, attempt, release)

    def signal_gang(self, uid: str, attempt: int, *, stop: bool) -> None:
        """Ranks were asked to checkpoint, and to stop if ``stop``."""
        self.training.signal(uid, attempt, stop=stop)

    def launcher_ended(self, launcher: SimLauncher, code: int) -> None:
        """Take that a launcher's process ended: its kubelet reports it."""
        self.kubelets.launcher_ended(launcher, code)


def _relaxed(check: Callable[[Manifest], None]) -> Callable[[Manifest], None]:
    """Return a check that lets those objects through that are malformed on purpose."""
    return lambda manifest: None if is_set_apart(manifest) else check(manifest)
