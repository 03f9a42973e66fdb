"""A pod's launcher in the simulation: the real state machines, simulated ranks and network."""

from __future__ import annotations

import random
import signal
from collections import deque
from collections.abc import Callable
from typing import Protocol

from polyreme_api.environment import PodEnvironment
from polyreme_api.exit_codes import code_of_signal
from polyreme_cluster.port import ObjectRef
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.messages import Joined, Message, Release
from polyreme_simulator.cluster_view import LauncherView
from polyreme_simulator.sim_leader import TICK_S, LauncherProcess, LeaderContext, SimLeader
from polyreme_simulator.training import Rank

NETWORK_S = 0.01
KILL_S = 0.05
KILLED = code_of_signal(signal.SIGKILL)


class LauncherContext(LeaderContext, Protocol):
    """What a launcher needs of the simulated cluster."""

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

    def lost(self, other: LauncherProcess) -> None:
        """A connection broke."""
        if not self.world.connected(self, other):
            return
        self.deliver(lambda: self.forget(other))

    def forget(self, other: LauncherProcess) -> None:
        """Take the end of a connection."""
        if self.leader is other:
            self.leader = None
            self.feed(f.LeaderLost())
        if self.leading is not None:
            self.leading.forget(other)

    def send(self, to: LauncherProcess, act: Callable[[], None]) -> None:
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
        """Ranks that wait for a stopped one use no CPU time, on whichever worker that one is."""
        alive = [rank for rank in self.ranks.values() if rank.alive]
        gang = self.world.gangs.get((self.pod.job_uid, self.follower.forked_attempt))
        waits = gang is not None and any(rank.stopped for rank in gang.ranks.values())
        stopped = tuple(sorted(rank.rank for rank in alive if rank.stopped))
        return f.RanksSampled(idle=len(alive) if waits else 0, stopped=stopped)

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
