"""A whole gang of launcher machines under random orders of events: what must hold, holds at every step.

The wire keeps the order within one connection and loses what is under way when it breaks. Everything else may happen in
any order: attempts, crashes, broken connections, replaced pods, slow resume points, time.
"""

import dataclasses
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.launch import follower as f
from polyreme_api.launch import leader as l
from polyreme_api.launch.messages import Finish, Message, Release
from polyreme_api.progress import Outcome, ProgressRecord, RankPhase

REPLICAS, DEVICES = 3, 2
STEPS = 600


@dataclasses.dataclass
class Pod:
    """One follower with its ranks and its wire to the leader."""

    state: f.FollowerState
    to_leader: deque[Message] = dataclasses.field(default_factory=deque)
    from_leader: deque[Message] = dataclasses.field(default_factory=deque)
    connected: bool = False
    live: dict[int, int] = dataclasses.field(default_factory=dict)
    """Attempt by rank that lives."""
    dying: set[int] = dataclasses.field(default_factory=set)
    forked: set[int] = dataclasses.field(default_factory=set)
    ended: int | None = None


class Gang:
    """The world around the machines; checks as it goes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.leader = l.LeaderState(replacement=0)
        self.pods = [self.pod(index, 0) for index in range(REPLICAS)]
        self.corpses: list[Pod] = []
        """Pods that were replaced while their ranks were still alive."""
        self.number = 0
        self.fixing: list[int] = []
        self.released: list[int] = []
        self.lease: ProgressRecord | None = None
        self.unwritten: ProgressRecord | None = None
        self.said_done: set[int] = set()
        self.exit_codes: dict[int, dict[int, int | None]] = {}

    def pod(self, index: int, replacement: int) -> Pod:
        return Pod(state=f.FollowerState(index=index, replacement=replacement, devices=DEVICES))

    # ------------------------------------------------------------------------------------------------- what can happen

    def step(self) -> None:
        pod = self.random.choice(self.pods)
        acts = [
            (6, lambda: self.deliver_to_leader(pod)),
            (6, lambda: self.deliver_to_follower(pod)),
            (3, lambda: self.connect(pod)),
            (4, lambda: self.rank_dies(self.random.choice([*self.pods, *self.corpses]))),
            (2, self.resume_fixed),
            (2, self.lease_written),
            (0.5, self.tick),
            (0.3, lambda: self.disconnect(pod)),
            (0.3, lambda: self.crash(pod)),
            (0.2, self.new_attempt),
            (0.5, lambda: self.rank_ends_well(pod)),
            (0.1, lambda: self.replace(pod)),
            (0.05, self.stop),
        ]
        self.random.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        self.check()

    def new_attempt(self, *, run: bool = True) -> None:
        self.number += run
        if not self.number:
            return
        replacements = {pod.state.index: pod.state.replacement for pod in self.pods if pod.state.replacement}
        view = l.AttemptView(
            number=self.number,
            run=run,
            checkpoint_requested=not run and self.random.random() < 0.5,
            replicas=REPLICAS,
            devices=DEVICES,
            replacements=replacements,
            job_json="{}",
            plan_json="{}",
        )
        self.lead(l.JobChanged(attempt=view))

    def stop(self) -> None:
        self.new_attempt(run=False)

    def connect(self, pod: Pod) -> None:
        if pod.connected or pod.ended is not None:
            return
        pod.connected = True
        self.lead(l.PeerConnected(index=pod.state.index, replacement=pod.state.replacement))
        self.follow(pod, f.LeaderConnected())

    def disconnect(self, pod: Pod) -> None:
        # Index 0 is in the leader's own process.
        if pod.connected and pod.state.index:
            pod.connected = False
            pod.to_leader.clear()
            pod.from_leader.clear()
            self.lead(l.PeerLost(index=pod.state.index, replacement=pod.state.replacement))
            self.follow(pod, f.LeaderLost())

    def deliver_to_leader(self, pod: Pod) -> None:
        if pod.to_leader:
            message = pod.to_leader.popleft()
            self.lead(l.FromPeer(index=pod.state.index, replacement=pod.state.replacement, message=message))

    def deliver_to_follower(self, pod: Pod) -> None:
        if pod.from_leader and pod.ended is None:
            self.follow(pod, f.FromLeader(message=pod.from_leader.popleft()))

    def crash(self, pod: Pod) -> None:
        for rank in list(pod.live)[:1]:
            self.end_rank(pod, rank, None)

    def rank_dies(self, pod: Pod) -> None:
        for rank in list(pod.dying)[:1]:
            self.end_rank(pod, rank, None)

    def rank_ends_well(self, pod: Pod) -> None:
        for rank in list(pod.live)[:1]:
            attempt = pod.live[rank]
            if rank == 0:
                self.said_done.add(attempt)
                self.lead(l.ProgressFromRank(record=ProgressRecord(attempt=attempt, phase=RankPhase.DONE)))
            self.end_rank(pod, rank, 0)

    def end_rank(self, pod: Pod, rank: int, code: int | None) -> None:
        attempt = pod.live.pop(rank)
        pod.dying.discard(rank)
        if pod not in self.corpses:
            self.exit_codes.setdefault(attempt, {})[rank] = code
        self.follow(pod, f.RankExited(attempt=attempt, rank=rank, code=code, signal=9 if code is None else None))

    def replace(self, pod: Pod) -> None:
        """The operator lets a pod go once it is absent, and puts another in its place under a new attempt."""
        if pod.state.index == 0 or pod.live:
            return
        self.disconnect(pod)
        self.corpses.append(pod)
        self.pods[pod.state.index] = self.pod(pod.state.index, pod.state.replacement + 1)
        self.new_attempt()

    def resume_fixed(self) -> None:
        if self.fixing:
            attempt = self.fixing.pop(self.random.randrange(len(self.fixing)))
            self.lead(
                l.ResumeFixed(attempt=attempt, resume_from=None, step=0, master_address="127.0.0.1", master_port=1)
            )

    def lease_written(self) -> None:
        if self.unwritten is not None:
            self.lease, self.unwritten = self.unwritten, None
            self.lead(l.LeaseWritten(record=self.lease))

    def tick(self) -> None:
        self.now_s += self.random.choice([0.5, 2.0, 2.0, 8.0])
        self.lead(f.Tick())
        for pod in self.pods:
            if pod.ended is None:
                self.follow(pod, f.Tick())

    # ----------------------------------------------------------------------------------------------- the world's answer

    def lead(self, event: l.LeaderEvent) -> None:
        self.leader, effects = l.LeaderMachine.step(self.leader, event, self.now_s)
        for effect in effects:
            match effect:
                case l.SendTo(index=index, message=message):
                    self.send(index, message)
                case l.Broadcast(message=message):
                    if isinstance(message, Release):
                        self.check_release(message)
                    for index in self.leader.peers:
                        self.send(index, message)
                case l.FixResume(attempt=attempt):
                    self.fixing.append(attempt)
                case l.RenewLease(record=record):
                    self.unwritten = record
                case _:
                    pass

    def send(self, index: int, message: Message) -> None:
        pod = self.pods[index]
        if isinstance(message, Finish):
            assert self.lease is not None
            assert self.lease.outcome is Outcome.SUCCEEDED
        if pod.connected:
            pod.from_leader.append(message)

    def follow(self, pod: Pod, event: f.FollowerEvent) -> None:
        pod.state, effects = f.FollowerMachine.step(pod.state, event, self.now_s)
        for effect in effects:
            match effect:
                case f.ForkRanks(directive=directive, release=release):
                    assert directive.attempt == release.attempt
                    self.check_fork(pod, release.attempt)
                    pod.forked.add(release.attempt)
                    pod.live = dict.fromkeys(pod.state.ranks, release.attempt)
                case f.KillRanks():
                    pod.dying = set(pod.live)
                case f.SendToLeader(message=message) if pod.connected:
                    pod.to_leader.append(message)
                case f.ExitProcess(code=code):
                    assert not pod.live
                    pod.ended = code
                case _:
                    pass

    # --------------------------------------------------------------------------------------------------- what must hold

    def check_release(self, release: Release) -> None:
        assert release.attempt not in self.released, "released twice"
        assert release.attempt == self.number, "released an attempt of the past"
        for pod in (*self.pods, *self.corpses):
            assert not pod.live, f"released while ranks of {set(pod.live.values())} live"
        self.released.append(release.attempt)

    def check_fork(self, pod: Pod, attempt: int) -> None:
        assert attempt in self.released
        assert attempt not in pod.forked, "forked twice"
        assert not pod.live

    def check(self) -> None:
        attempts = {attempt for pod in (*self.pods, *self.corpses) for attempt in pod.live.values()}
        assert len(attempts) <= 1, f"ranks of attempts {attempts} live together"
        record = self.leader.record
        if record is not None and record.outcome is Outcome.SUCCEEDED:
            codes = self.exit_codes.get(record.attempt, {})
            assert codes == dict.fromkeys(range(REPLICAS * DEVICES), 0)
            assert record.attempt in self.said_done


@settings(max_examples=200, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_no_order_of_events_breaks_the_barrier(seed: int) -> None:
    gang = Gang(seed)
    gang.new_attempt()
    for _ in range(STEPS):
        gang.step()


@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_a_gang_that_is_left_in_peace_runs_to_success(seed: int) -> None:
    gang = Gang(seed)
    gang.new_attempt()
    for _ in range(200):
        gang.step()
    if gang.leader.finished:
        return
    gang.new_attempt()
    for _ in range(2_000):
        for pod in gang.pods:
            gang.connect(pod)
            gang.deliver_to_leader(pod)
            gang.deliver_to_follower(pod)
            while pod.dying:
                gang.rank_dies(pod)
            if len(gang.released) and gang.released[-1] == gang.number:
                gang.rank_ends_well(pod)
        gang.resume_fixed()
        gang.lease_written()
        gang.lead(f.Tick())
        gang.check()
        if all(pod.ended == 0 for pod in gang.pods):
            return
    raise AssertionError(f"never succeeded: {gang.leader.record}")


def test_the_random_gangs_reach_what_they_are_about() -> None:
    reached = {"released": 0, "succeeded": 0}
    for seed in range(20):
        gang = Gang(seed)
        gang.new_attempt()
        for _ in range(STEPS):
            gang.step()
        reached["released"] += len(gang.released)
        reached["succeeded"] += gang.leader.finished
    assert reached["released"] > 20
