"""A pod's launcher in the simulation: the real state machines, simulated ranks and network."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

from polyreme_api import labels
from polyreme_api.environment import PodEnvironment
from polyreme_api.exit_codes import code_of_signal
from polyreme_api.job.policy import Hang
from polyreme_api.job.status import replacements_by_index
from polyreme_api.ownership import is_marked, job_object_metadata
from polyreme_api.progress import ProgressRecord
from polyreme_api.rank_state import RankActivity, RankState, RankWait
from polyreme_api.resume_point import fix_resume_point
from polyreme_api.signed_progress import ProgressSigner
from polyreme_cluster.port import Manifest, ObjectRef, PortError
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.hang_evidence import HangLimits
from polyreme_launcher.protocol.messages import Joined, Message, Release
from polyreme_simulator.cluster_view import ClusterView, LauncherView
from polyreme_simulator.invariants import Facts
from polyreme_simulator.profiles import Profile
from polyreme_simulator.training import Rank

TICK_S = 1.0
NETWORK_S = 0.01
API_S = 0.02
KILL_S = 0.05
LEASE_RETRY_S = 0.5
KILLED = code_of_signal(signal.SIGKILL)
STORE_RETRIES_S = (0.5, 2.0, 6.0)
LONG_MS = 3_600_000
"""Of ranks that wait, since their pages last advanced: the observer's own clock decides."""
LEASE_FAILS = 0.1
"""Chance that a write of the Lease fails while faults last."""


class LauncherContext(ClusterView, Protocol):
    """What a launcher needs of the simulated cluster."""

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

    def connected(self, one: LauncherView, other: LauncherView) -> bool:
        """Tell whether two processes reach each other."""

    def leader_of(self, uid: str) -> SimLauncher | None:
        """Return the launcher to which a job's Service leads."""

    def forked(self, launcher: SimLauncher, attempt: int, release: Release) -> None:
        """Take that ranks were forked."""

    def signal_gang(self, uid: str, attempt: int, *, stop: bool) -> None:
        """Ask ranks to checkpoint, and to stop if ``stop``."""

    def launcher_ended(self, launcher: SimLauncher, code: int) -> None:
        """Take that a launcher's process ended."""


class SimLauncher:
    """One process: follower machine, on index 0 also leader machine, and its ranks."""

    def __init__(
        self,
        world: LauncherContext,
        environment: PodEnvironment,
        *,
        key: bytes,
        pod_uid: str,
        node: str,
        rng: random.Random,
    ) -> None:
        self.world, self.pod, self.pod_uid, self.node, self._rng = world, environment, pod_uid, node, rng
        self.alive = True
        self.frozen = False
        self.zombie = False
        """Its pod was deleted by force while its node was away."""
        self.follower = f.FollowerState(
            index=environment.index,
            replacement=environment.replacement,
            devices=environment.devices,
            launcher=pod_uid,
        )
        self.leading = SimLeader(self, world, key=key, rng=rng) if environment.index == 0 else None
        self.ranks: dict[int, Rank] = {}
        self.leader: SimLauncher | None = None
        """The leader that this launcher is connected to."""
        self._inbox: deque[Callable[[], None]] = deque()
        self._sent_s: dict[int, float] = {}
        self._connecting = False

    @property
    def ref(self) -> ObjectRef:
        """Of its pod."""
        return ObjectRef(kind="Pod", namespace=self.pod.namespace, name=self.pod.pod)

    def start(self) -> None:
        """Begin to run."""
        if self.leading is not None:
            self.leader = self
            self.leading.accept(self)
            self.feed(f.LeaderConnected())
            self.leading.read_job()
        self._tick()

    # ------------------------------------------------------------------------------------------------ process life

    def deliver(self, act: Callable[[], None]) -> None:
        """Run an event in this process; a stopped one takes it when it continues, a dead one never."""
        if not self.alive:
            return
        if self.frozen:
            self._inbox.append(act)
        else:
            act()

    def freeze(self) -> None:
        """SIGSTOP to launcher and ranks."""
        self.frozen = True
        for rank in self.ranks.values():
            rank.stop()

    def thaw(self) -> None:
        """SIGCONT: everything that came in meanwhile is taken now, late."""
        self.frozen = False
        for rank in self.ranks.values():
            rank.stopped = False
        while self._inbox and self.alive and not self.frozen:
            self._inbox.popleft()()

    def terminate(self, grace_s: float) -> None:
        """SIGTERM, and SIGKILL when the grace is over."""
        self.deliver(lambda: self.feed(f.StopRequested(grace_s=max(0.0, grace_s - 5.0))))
        self.world.after(grace_s, self.kill)

    def kill(self, code: int = KILLED) -> None:
        """End the process and, by the death signal, its ranks."""
        if not self.alive:
            return
        self.alive = False
        for rank in self.ranks.values():
            rank.end(signal=signal.SIGKILL)
        peers = [] if self.leading is None else list(self.leading.peers.values())
        for peer in [*peers, *([self.leader] if self.leader is not None else [])]:
            if peer is not self:
                self.world.after(self._rng.random() * NETWORK_S, lambda peer=peer: peer.lost(self))  # type: ignore[misc]
        self.world.launcher_ended(self, code)

    # ----------------------------------------------------------------------------------------------------- network

    def lost(self, other: SimLauncher) -> None:
        """A connection broke."""
        if not self.world.connected(self, other):
            return
        self.deliver(lambda: self.forget(other))

    def forget(self, other: SimLauncher) -> None:
        """Take the end of a connection."""
        if self.leader is other:
            self.leader = None
            self.feed(f.LeaderLost())
        if self.leading is not None:
            self.leading.forget(other)

    def send(self, to: SimLauncher, act: Callable[[], None]) -> None:
        """Deliver in order, if the network still connects the two."""
        key = id(to)
        at_s = max(self.world.time_s() + self._rng.random() * NETWORK_S, self._sent_s.get(key, 0.0) + 1e-6)
        self._sent_s[key] = at_s

        def arrive() -> None:
            if self.world.connected(self, to):
                to.deliver(act)
            else:
                # Nothing is lost unseen: a connection that can't deliver breaks, on both ends.
                self.deliver(lambda: self.forget(to))
                to.deliver(lambda: to.forget(self))

        self.world.after(at_s - self.world.time_s(), arrive)

    def _connect(self) -> None:
        target = self.world.leader_of(self.pod.job_uid) if self.world.has_child(self.pod, "Service") else None
        leading = None if target is None else target.leading
        if self._connecting or target is None or leading is None or target.frozen:
            return
        if not self.world.connected(self, target):
            return
        self._connecting = True

        def done() -> None:
            self._connecting = False
            if not target.alive or not self.alive or self.leader is not None:
                return
            target.deliver(lambda: leading.accept(self))
            self.leader = target
            self.deliver(lambda: self.feed(f.LeaderConnected()))

        self.world.after(self._rng.random() * NETWORK_S, done)

    # ---------------------------------------------------------------------------------------------------- machines

    def _tick(self) -> None:
        if not self.alive:
            return
        if not self.frozen:
            if self.leader is None and self.pod.index != 0:
                self._connect()
            self.feed(self._look())
            self.feed(f.Tick())
            if self.leading is not None:
                self.leading.feed(f.Tick())
        self.world.after(TICK_S * (0.9 + 0.2 * self._rng.random()), self._tick)

    def _look(self) -> f.RanksSampled:
        """Ranks of a gang advance together, unless all are busy or wait, idly, for a stopped one on any worker."""
        gang = self.world.gangs.get((self.pod.job_uid, self.follower.forked_attempt))
        waits = gang is not None and any(rank.stopped for rank in gang.ranks.values())
        busy = gang is not None and self.world.time_s() < gang.busy_until_s
        states = [
            RankState(
                rank=rank.rank,
                activity=RankActivity.STEP,
                step=0 if gang is None else gang.step + 1,
                wait=RankWait.EXCHANGE if waits and not rank.stopped else RankWait.NOTHING,
                moves=waits + 2 * busy or int(self.world.time_s() * 1000),
                quiet_ms=LONG_MS if waits or busy else 0,
                idle=waits,
                stopped=rank.stopped,
            )
            for rank in self.ranks.values()
            if rank.alive
        ]
        return f.RanksSampled(states=tuple(states))

    def feed(self, event: f.FollowerEvent) -> None:
        """Step the follower's machine and do what it asks."""
        if not self.alive:
            return
        self.follower, effects = f.FollowerMachine.step(self.follower, event, self.world.time_s())
        for effect in effects:
            self._do(effect)

    def _do(self, effect: f.FollowerEffect) -> None:
        match effect:
            case f.SendToLeader(message=message):
                self._to_leader(message)
            case f.ForkRanks(directive=directive, release=release):
                self._fork(directive.attempt, release)
            case f.KillRanks():
                for rank in self.ranks.values():
                    self.world.after(self._rng.random() * KILL_S, lambda rank=rank: rank.end(signal=signal.SIGKILL))  # type: ignore[misc]
            case f.SignalRanks(signal=sent):
                self.world.signal_gang(self.pod.job_uid, self.follower.forked_attempt, stop=sent is f.RankSignal.STOP)
            case f.ExitProcess(code=code):
                self.kill(code)

    def _to_leader(self, message: Message) -> None:
        leader = self.leader
        leading = None if leader is None else leader.leading
        if leader is None or leading is None:
            return
        if isinstance(message, Joined):
            self.world.facts.rules.gangs.joined(self, message)
        event = l.FromPeer(index=self.pod.index, replacement=self.pod.replacement, message=message)
        if leader is self:
            leading.feed(event)
        else:
            # A connection that the other end has given up answers with a reset.
            def arrive() -> None:
                if leading.peers.get(self.pod.index) is self:
                    leading.feed(event)
                else:
                    self.lost(leader)

            self.send(leader, arrive)

    def _fork(self, attempt: int, release: Release) -> None:
        self.ranks = {}
        for number in self.follower.ranks:
            rank = Rank(attempt=attempt, rank=number, ended=self._rank_ended)
            self.ranks[number] = rank
        self.world.forked(self, attempt, release)

    def _rank_ended(self, rank: Rank, code: int | None, signal: int | None) -> None:
        self.world.facts.rules.gangs.rank_ended(self.pod.job_uid, rank.attempt, code=code)
        event = f.RankExited(attempt=rank.attempt, rank=rank.rank, code=code, signal=signal)
        self.deliver(lambda: self.feed(event))


class SimLeader:
    """The leader of one job, in the process of index 0.

    Args:
        process: The process.
        world: The cluster.
        key: The job's key.
        rng: Every draw of the process.
    """

    def __init__(self, process: SimLauncher, world: LauncherContext, *, key: bytes, rng: random.Random) -> None:
        self._process, self._world, self._pod, self._rng = process, world, process.pod, rng
        self._state = l.LeaderState(replacement=self._pod.replacement)
        self.peers: dict[int, SimLauncher] = {}
        self._signer = ProgressSigner(key, self._pod.job_uid)
        self._lease_next: ProgressRecord | None = None
        self._lease_busy = False
        self._watches = False
        """Whether it has been allowed to watch its job."""

    def forget(self, other: SimLauncher) -> None:
        """Take the end of a follower's connection."""
        if self.peers.get(other.pod.index) is other:
            del self.peers[other.pod.index]
            self.feed(l.PeerLost(index=other.pod.index, replacement=other.pod.replacement))

    def accept(self, peer: SimLauncher) -> None:
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
        hang = ((job or {})["spec"].get("health") or {}).get("hang") or {}
        view = l.AttemptView(
            number=attempt["number"],
            run=attempt["desired"] == "Run",
            checkpoint_requested=attempt["checkpointRequested"],
            replicas=attempt["replicas"],
            devices=attempt["devices"],
            replacements=replacements_by_index(attempt["replacements"]),
            job_json="{}",
            plan_json="{}",
            hang_limits=HangLimits(step_s=float(hang.get("stallSeconds", Hang().stall_seconds))),
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
