"""The part of a launcher on index 0 that leads: the real state machine, its Lease, the resume points that it fixes."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any, Protocol

from polyreme_api import labels
from polyreme_api.environment import PodEnvironment
from polyreme_api.job.status import replacements_by_index
from polyreme_api.ownership import is_marked, job_object_metadata
from polyreme_api.progress import ProgressRecord
from polyreme_api.resume_point import fix_resume_point
from polyreme_api.signed_progress import ProgressSigner
from polyreme_cluster.port import Manifest, ObjectRef, PortError
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.messages import Message, Release
from polyreme_simulator.cluster_view import ClusterView, LauncherView
from polyreme_simulator.invariants import Facts
from polyreme_simulator.profiles import Profile

TICK_S = 1.0
API_S = 0.02
LEASE_RETRY_S = 0.5
STORE_RETRIES_S = (0.5, 2.0, 6.0)
LEASE_FAILS = 0.1
"""Chance that a write of the Lease fails while faults last."""


class LeaderContext(ClusterView, Protocol):
    """What a leader needs of the simulated cluster."""

    @property
    def facts(self) -> Facts:
        """Where it reports what it does."""

    @property
    def profile(self) -> Profile:
        """What the seed is about."""

    def after(self, delay_s: float, act: Callable[[], Any]) -> None:
        """Do something later."""

    def job(self, uid: str) -> Manifest | None:
        """Return a job by UID."""

    def reaches_api(self, launcher: LauncherView) -> bool:
        """Tell whether a process reaches the API server."""

    def has_child(self, pod: PodEnvironment, kind: str) -> bool:
        """Tell whether an object exists that a job's pods need."""


class LauncherProcess(LauncherView, Protocol):
    """A launcher's process: the leader's own, or a follower's."""

    @property
    def pod_uid(self) -> str:
        """UID of its pod."""

    @property
    def leader(self) -> LauncherProcess | None:
        """The leader that it is connected to."""

    def deliver(self, act: Callable[[], None]) -> None:
        """Run an event in this process."""

    def send(self, to: LauncherProcess, act: Callable[[], None]) -> None:
        """Run an event in another process, if the network connects the two."""

    def feed(self, event: f.FollowerEvent) -> None:
        """Step the follower's machine."""

    def lost(self, other: LauncherProcess) -> None:
        """A connection broke."""

    def forget(self, other: LauncherProcess) -> None:
        """Take the end of a connection."""

    def kill(self, code: int) -> None:
        """End the process."""


class SimLeader:
    """The leader of one job, in the process of index 0.

    Args:
        process: The process.
        world: The cluster.
        key: The job's key.
        rng: Every draw of the process.
    """

    def __init__(self, process: LauncherProcess, world: LeaderContext, *, key: bytes, rng: random.Random) -> None:
        self._process, self._world, self._pod, self._rng = process, world, process.pod, rng
        self._state = l.LeaderState(replacement=self._pod.replacement)
        self.peers: dict[int, LauncherProcess] = {}
        self._signer = ProgressSigner(key, self._pod.job_uid)
        self._lease_next: ProgressRecord | None = None
        self._lease_busy = False
        self._watches = False
        """Whether it has been allowed to watch its job."""

    def forget(self, other: LauncherProcess) -> None:
        """Take the end of a follower's connection."""
        if self.peers.get(other.pod.index) is other:
            del self.peers[other.pod.index]
            self.feed(l.PeerLost(index=other.pod.index, replacement=other.pod.replacement))

    def accept(self, peer: LauncherProcess) -> None:
        """Take a follower that has proved itself."""
        self.peers[peer.pod.index] = peer
        self.feed(l.PeerConnected(index=peer.pod.index, replacement=peer.pod.replacement))

    def report(self, record: ProgressRecord) -> None:
        """Take rank 0's word."""
        self._process.deliver(lambda: self.feed(l.ProgressFromRank(record=record)))

    def feed(self, event: l.LeaderEvent) -> None:
        """Step the leader's machine and do what it asks."""
        if not self._process.alive:
            return
        self._state, effects = l.LeaderMachine.step(self._state, event, self._world.time_s())
        for effect in effects:
            self._lead(effect)

    def _lead(self, effect: l.LeaderEffect) -> None:
        match effect:
            case l.SendTo(index=index, message=message):
                self._to_peer(index, message)
            case l.Broadcast(message=message):
                if isinstance(message, Release):
                    self._world.facts.rules.gangs.released(self._process, message, self._world)
                for index in sorted(self.peers):
                    self._to_peer(index, message)
            case l.DropPeer(index=index, replacement=replacement):
                peer = self.peers.get(index)
                if peer is not None and peer.pod.replacement == replacement:
                    del self.peers[index]
                    self._process.send(peer, lambda: peer.forget(self._process))
            case l.FixResume(attempt=attempt):
                self._world.after(self._rng.random() * API_S, lambda: self._fix(attempt))
            case l.RenewLease(record=record):
                self._lease_next = record
                self._write_lease()
            case f.ExitProcess(code=code):
                self._process.kill(code)

    def _to_peer(self, index: int, message: Message) -> None:
        peer = self.peers.get(index)
        process = self._process
        if peer is process:
            process.feed(f.FromLeader(message=message))
        elif peer is not None:
            process.send(
                peer, lambda: peer.feed(f.FromLeader(message=message)) if peer.leader is process else process.lost(peer)
            )

    def _fix(self, attempt: int) -> None:
        if not self._process.alive:
            return
        fails = self._world.faulty and self._rng.random() < self._world.profile.store_fails
        root, now_s = self._world.root(self._pod.job_uid), self._world.clock.now_s()
        lost = fails and self._rng.random() < 0.5
        point = None if lost else fix_resume_point(root, attempt=attempt, by=self._process.pod_uid, now_s=now_s)
        if fails:
            self._world.after(
                self._rng.choice(STORE_RETRIES_S), lambda: self._process.deliver(lambda: self._fix(attempt))
            )
            return
        event: l.LeaderEvent = l.Fenced(attempt=attempt)
        if point is not None:
            event = l.ResumeFixed(
                attempt=attempt, resume_from=point.resume_from, step=point.step, master_address="host", master_port=1
            )
        self._process.deliver(lambda: self.feed(event))

    def read_job(self) -> None:
        """Hear of the job as it is now."""
        self._world.after(self._rng.random() * API_S, lambda: self._process.deliver(self._read_job))

    def _read_job(self) -> None:
        if not self._world.reaches_api(self._process):
            return
        if not self._watches and not all(self._world.has_child(self._pod, kind) for kind in ("Role", "RoleBinding")):
            # Rights are checked when a watch begins.
            self._world.after(TICK_S, self.read_job)
            return
        self._watches = True
        job = self._world.job(self._pod.job_uid)
        attempt = ((job or {}).get("status") or {}).get("attempt")
        if attempt is None:
            return
        view = l.AttemptView(
            number=attempt["number"],
            run=attempt["desired"] == "Run",
            checkpoint_requested=attempt["checkpointRequested"],
            replicas=attempt["replicas"],
            devices=attempt["devices"],
            replacements=replacements_by_index(attempt["replacements"]),
            job_json="{}",
            plan_json="{}",
        )
        self.feed(l.JobChanged(attempt=view))

    def _write_lease(self) -> None:
        if self._lease_busy or self._lease_next is None or not self._process.alive:
            return
        self._lease_busy = True
        record, self._lease_next = self._lease_next, None

        def again() -> None:
            self._lease_busy = False
            self._lease_next = self._lease_next or record
            self._write_lease()

        def write() -> None:
            if not self._process.alive:
                return
            fails = self._world.faulty and self._rng.random() < LEASE_FAILS
            if not self._world.reaches_api(self._process) or fails or not self._put_record(record):
                self._world.after(LEASE_RETRY_S, again)
                return
            self._lease_busy = False
            self._write_lease()

        # A stopped process sends nothing; what it had sent already is not held up.
        self._world.after(self._rng.random() * API_S, lambda: self._process.deliver(write))

    def _put_record(self, record: ProgressRecord) -> bool:
        name = labels.job_object_name(self._pod.job, self._pod.job_uid)
        ref = ObjectRef(kind="Lease", namespace=self._pod.namespace, name=name)
        try:
            lease = self._world.store.shown(ref)
            known = self._signer.read(lease)
            if known is not None and known.outdates(record):
                self.feed(l.Fenced())
                return True
            annotations = self._signer.annotations(record, at_s=self._world.clock.now_s())
            own = (self._pod.job, self._pod.job_uid)
            marks = {} if is_marked(lease["metadata"], self._pod.job_uid) else job_object_metadata(*own)
            self._world.store.change(ref, {"metadata": {"annotations": annotations, **marks}})
            if marks:
                # Its job may be deleted meanwhile.
                self._world.after(API_S, self._world.store.collect_garbage)
        except PortError:
            return False
        self.feed(l.LeaseWritten(record=record))
        return True
