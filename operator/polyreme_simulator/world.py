"""The simulated cluster around the real operator: store, kubelets, scheduler, garbage collector, gangs of ranks."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

from polyreme_api.environment import PodEnvironment
from polyreme_api.exit_codes import ExitCode
from polyreme_api.history import parse_checkpoint_name
from polyreme_api.progress import CheckpointRef, Outcome, ProgressRecord, RankPhase, StepRecord
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, WatchEventType
from polyreme_launcher.protocol.messages import Release
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.record import Change
from polyreme_local.api_server.schema import SCHEMAS
from polyreme_local.api_server.store import Store
from polyreme_simulator.event_loop import SimClock, VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.kubelets import KUBELET_S, Kubelets
from polyreme_simulator.launcher import SimLauncher
from polyreme_simulator.nodes import SimNode, takes_pods
from polyreme_simulator.ownership import is_set_apart
from polyreme_simulator.profiles import MIXED, Profile
from polyreme_simulator.refused_children import exists_child
from polyreme_simulator.scheduler import KubeScheduler
from polyreme_simulator.training import Gang, Root

GARBAGE_S = 1.0
BOOT_S = 1.0
STEP_S = 0.4
COMMIT_S = 0.3
LATE_PUT_S = 8.0
"""Longest time by which a checkpoint's marker lands late."""
POLL_S = 0.5


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
        self.reached: Counter[tuple[str, str]] = Counter()
        self.kubelets = Kubelets(self)
        self.scheduler = KubeScheduler(self)
        self.launchers: dict[str, SimLauncher] = {}
        self.roots: dict[str, Root] = {}
        self.gangs: dict[tuple[str, int], Gang] = {}
        self.stopping: set[tuple[str, int]] = set()
        self.faulty = True
        self.launcher_rbac = False
        """Whether launchers need Roles to read their job."""
        self.calm_since_s = 0.0
        """When the faults ended."""
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

    @property
    def nodes(self) -> dict[str, SimNode]:
        """Machines by name, those that are gone too."""
        return self.kubelets.nodes

    @property
    def lost_s(self) -> dict[str, float]:
        """When each machine was last away, or marked as out of service."""
        return self.kubelets.lost_s

    def add_node(self, name: str, devices: int, *, tags: dict[str, str] | None = None, owned: bool = False) -> None:
        """Add a machine."""
        self.kubelets.add(SimNode(name=name, devices=devices, labels=tags or {}), owned=owned)

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
                    launcher.read_job()
        if change.type is not WatchEventType.MODIFIED:
            # After creations, too: a late write may create a child of a job that is gone (test_port_objects.py).
            self.soon(GARBAGE_S, self.store.collect_garbage)

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
        try:
            return bool(self.store.shown(launcher.ref)["metadata"]["uid"] == launcher.pod_uid)
        except NotFoundError:
            return False

    def has_child(self, pod: PodEnvironment, kind: str) -> bool:
        """Tell whether an object exists that a job's pods need; Roles are needed only where they are created."""
        if kind in {"Role", "RoleBinding"} and not self.launcher_rbac:
            return True
        return exists_child(self, {"name": pod.job, "uid": pod.job_uid, "namespace": pod.namespace}, kind)

    def launcher_ended(self, launcher: SimLauncher, code: int) -> None:
        """Take that a launcher's process ended: its kubelet reports it."""
        self.kubelets.launcher_ended(launcher, code)

    # ------------------------------------------------------------------------------------------------------- training

    def forked(self, launcher: SimLauncher, attempt: int, release: Release) -> None:
        """Ranks were forked: when all of them are there, they train."""
        uid = launcher.pod.job_uid
        self.facts.rules.gangs.forked(launcher, attempt, release, self)
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
        if self.time_s() < gang.busy_until_s:
            self.after(POLL_S, lambda: self._train(uid, gang))
            return
        stop = (uid, gang.attempt) in self.stopping
        if stop or gang.step >= self.steps[uid]:
            last_s = self.profile.final_save_s if stop else COMMIT_S
            end = ExitCode.STOPPED if stop else ExitCode.OK
            self._commit(uid, gang, gang.step, lambda: self._end(uid, gang, end), within_s=last_s)
            return
        gang.step += 1
        self.root(uid).steps.setdefault(gang.attempt, []).append(
            StepRecord(attempt=gang.attempt, step=gang.step, loss=1.0 / gang.step)
        )
        self._report(uid, gang, RankPhase.TRAINING)
        if gang.step % self.checkpoint_every[uid] == 0:
            self._commit(uid, gang, gang.step)
        self.after(STEP_S * (0.5 + self.rng.random()), lambda: self._train(uid, gang))

    def _commit(
        self,
        uid: str,
        gang: Gang,
        step: int,
        then: Callable[[], None] | None = None,
        *,
        within_s: float = COMMIT_S,
    ) -> None:
        """Commit a checkpoint a little later; a stopped rank 0 commits when it continues, however late."""
        rank, reference = gang.ranks[0], CheckpointRef(attempt=gang.attempt, step=step)

        def write() -> None:
            if rank.stopped:
                self.after(POLL_S, write)
            elif rank.alive:
                late = self.faulty and self.rng.random() < self.profile.late_puts
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

        self.soon(within_s, write)

    def _end(self, uid: str, gang: Gang, code: int) -> None:
        if not gang.whole:
            if all(rank.alive for rank in gang.ranks.values()):
                self.after(POLL_S, lambda: self._end(uid, gang, code))
            return
        if code == ExitCode.OK:
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


def _relaxed(check: Callable[[Manifest], None]) -> Callable[[Manifest], None]:
    """Return a check that lets those objects through that are malformed on purpose."""
    return lambda manifest: None if is_set_apart(manifest) else check(manifest)
