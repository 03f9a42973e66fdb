"""A whole gang of launcher machines under random orders of events: what must hold, holds at every step.

The wire keeps the order within one connection and loses what is under way when it breaks. Everything else may happen in
any order: attempts, crashes, broken connections, replaced pods, slow resume points, time; leaders that die, and leaders
that freeze, are replaced, and wake beside their replacement; a leader's pod is gone with the Lease, and comes back
under its old number.
"""

import dataclasses
import random
from collections import deque

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from polyreme_api.progress import Outcome, ProgressRecord, RankPhase
from polyreme_launcher.protocol import follower as f
from polyreme_launcher.protocol import leader as l
from polyreme_launcher.protocol.messages import Finish, Message, Release

REPLICAS, DEVICES = 3, 2
STEPS = 600


@dataclasses.dataclass
class Pod:
    """One follower with its ranks and its wire to the leader."""

    state: f.FollowerState
    to_leader: deque[Message] = dataclasses.field(default_factory=deque)
    from_leader: deque[Message] = dataclasses.field(default_factory=deque)
    head: "Head | None" = None
    """The leader that it is connected to."""
    live: dict[int, int] = dataclasses.field(default_factory=dict)
    """Attempt by rank that lives."""
    dying: set[int] = dataclasses.field(default_factory=set)
    forked: set[int] = dataclasses.field(default_factory=set)
    ended: int | None = None


@dataclasses.dataclass(eq=False)
class Head:
    """A leader's process, without the follower in it."""

    state: l.LeaderState
    fixing: list[int] = dataclasses.field(default_factory=list)
    unwritten: ProgressRecord | None = None
    frozen: bool = False


class Gang:
    """The world around the machines; checks as it goes."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.now_s = 0.0
        self.head = Head(state=l.LeaderState(replacement=0))
        self.ghosts: list[Head] = []
        """Leaders that froze and were replaced."""
        self.pods = [self.pod(index, 0) for index in range(REPLICAS)]
        self.corpses: list[Pod] = []
        """Pods that were replaced while their ranks were still alive."""
        self.number = 0
        self.released: list[int] = []
        self.lease: ProgressRecord | None = None
        self.points: dict[int, Head] = {}
        """Who fixed the resume point of an attempt."""
        self.said_done: set[int] = set()
        self.exit_codes: dict[int, dict[int, int | None]] = {}

    @property
    def leader(self) -> l.LeaderState:
        return self.head.state

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
            (0.03, self.replace_dead_leader),
            (0.03, self.replace_frozen_leader),
            (0.05, self.begin_leader_anew),
            (0.1, self.ghost_wakes),
            (0.3, self.ghost_reads_the_job),
        ]
        self.random.choices([act for _, act in acts], [weight for weight, _ in acts])[0]()
        self.check()

    def new_attempt(self, *, run: bool = True) -> None:
        self.number += run
        if not self.number:
            return
        self.view = self.attempt_view(run=run)
        self.lead(l.JobChanged(attempt=self.view))

    def attempt_view(self, *, run: bool) -> l.AttemptView:
        replacements = {pod.state.index: pod.state.replacement for pod in self.pods if pod.state.replacement}
        return l.AttemptView(
            number=self.number,
            run=run,
            checkpoint_requested=not run and self.random.random() < 0.5,
            replicas=REPLICAS,
            devices=DEVICES,
            replacements=replacements,
            job_json="{}",
            plan_json="{}",
        )

    def stop(self) -> None:
        self.new_attempt(run=False)

    def connect(self, pod: Pod) -> None:
        if pod.head is not None or pod.ended is not None:
            return
        # Both listen at one address: who accepts is a matter of luck.
        awake = [head for head in (self.head, *self.ghosts) if not head.frozen and not head.state.finished]
        if not awake:
            return
        pod.head = self.head if pod.state.index == 0 else self.random.choice(awake)
        self.lead(l.PeerConnected(index=pod.state.index, replacement=pod.state.replacement), pod.head)
        self.follow(pod, f.LeaderConnected())

    def disconnect(self, pod: Pod) -> None:
        # Index 0 is in the leader's own process.
        if pod.head is not None and pod.state.index:
            head, pod.head = pod.head, None
            pod.to_leader.clear()
            pod.from_leader.clear()
            self.lead(l.PeerLost(index=pod.state.index, replacement=pod.state.replacement), head)
            self.follow(pod, f.LeaderLost())

    def deliver_to_leader(self, pod: Pod) -> None:
        if pod.to_leader and pod.head is not None and not pod.head.frozen:
            message = pod.to_leader.popleft()
            event = l.FromPeer(index=pod.state.index, replacement=pod.state.replacement, message=message)
            self.lead(event, pod.head)

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

    def replace_dead_leader(self) -> None:
        """Index 0's launcher dies with its ranks; another one begins with nothing but what the Lease and job say."""
        old = self.pods[0]
        for pod in self.pods[1:]:
            if pod.head is self.head:
                self.disconnect(pod)
        old.live.clear()
        self.begin_leader(old.state.replacement + 1)

    def replace_frozen_leader(self) -> None:
        """Its node seems lost, with its own ranks; the followers stay connected to it until they miss it."""
        if len(self.ghosts) < 2:
            self.head.frozen = True
            self.ghosts.append(self.head)
            self.begin_leader(self.pods[0].state.replacement + 1)

    def begin_leader(self, replacement: int) -> None:
        self.head = Head(state=l.LeaderState(replacement=replacement))
        self.pods[0] = self.pod(0, replacement)
        self.new_attempt()

    def begin_leader_anew(self) -> None:
        """Its pod and the Lease are deleted at once, and the pod is recreated before anyone knew that it was there.

        Nothing that the job or the Lease says tells the second leader of the first.
        """
        if not self.number or self.head.frozen:
            return
        for pod in self.pods[1:]:
            if pod.head is self.head:
                self.disconnect(pod)
        old, self.lease = self.pods[0], None
        old.live.clear()
        self.head = Head(state=l.LeaderState(replacement=old.state.replacement))
        self.pods[0] = self.pod(0, old.state.replacement)
        self.lead(l.JobChanged(attempt=self.view))

    def ghost_wakes(self) -> None:
        for ghost in self.ghosts:
            if ghost.frozen:
                ghost.frozen = False
                for index, number in list(ghost.state.peers.items()):
                    if index and self.pods[index].head is not ghost:
                        self.lead(l.PeerLost(index=index, replacement=number), ghost)

    def ghost_reads_the_job(self) -> None:
        for ghost in self.ghosts:
            if not ghost.frozen:
                self.lead(l.JobChanged(attempt=self.view), ghost)
                assert ghost.state.finished, "a leader of the past that knows it leads no more"
                for pod in self.pods:
                    if pod.head is ghost:
                        self.disconnect(pod)

    def resume_fixed(self) -> None:
        head = self.random.choice([self.head, *self.ghosts])
        if head.fixing and not head.frozen:
            attempt = head.fixing.pop(self.random.randrange(len(head.fixing)))
            fixed = l.ResumeFixed(attempt=attempt, resume_from=None, step=0, master_address="127.0.0.1", master_port=1)
            first = self.points.setdefault(attempt, head) is head
            self.lead(fixed if first else l.Fenced(attempt=attempt), head)

    def lease_written(self) -> None:
        head = self.random.choice([self.head, *self.ghosts])
        if head.unwritten is None or head.frozen:
            return
        record, head.unwritten = head.unwritten, None
        if self.lease is not None and order(self.lease) > order(record):
            self.lead(l.Fenced(), head)
        else:
            self.lease = record
            self.lead(l.LeaseWritten(record=record), head)

    def tick(self) -> None:
        self.now_s += self.random.choice([0.5, 2.0, 2.0, 8.0])
        self.lead(f.Tick())
        for pod in self.pods:
            if pod.ended is None:
                self.follow(pod, f.Tick())

    # ----------------------------------------------------------------------------------------------- the world's answer

    def lead(self, event: l.LeaderEvent, head: Head | None = None) -> None:
        head = head or self.head
        if head.frozen:
            return
        head.state, effects = l.LeaderMachine.step(head.state, event, self.now_s)
        for effect in effects:
            match effect:
                case l.SendTo(index=index, message=message):
                    self.send(head, index, message)
                case l.Broadcast(message=message):
                    if isinstance(message, Release):
                        self.check_release(head, message)
                    for index in head.state.peers:
                        self.send(head, index, message)
                case l.FixResume(attempt=attempt):
                    head.fixing.append(attempt)
                case l.RenewLease(record=record):
                    head.unwritten = record
                case _:
                    pass

    def send(self, head: Head, index: int, message: Message) -> None:
        pod = self.pods[index]
        if isinstance(message, Finish) and message.code == 0:
            assert self.lease is not None
            assert self.lease.outcome is Outcome.SUCCEEDED
        if pod.head is head:
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
                case f.SendToLeader(message=message) if pod.head is not None:
                    pod.to_leader.append(message)
                case f.ExitProcess(code=code):
                    assert not pod.live
                    pod.ended = code
                case _:
                    pass

    # --------------------------------------------------------------------------------------------------- what must hold

    def check_release(self, head: Head, release: Release) -> None:
        assert release.attempt not in self.released, "released twice"
        assert self.lease is not None
        assert self.lease.released, "released, and the Lease does not say so"
        if head is not self.head:
            # It may still release its own attempt, to the followers that are connected: no other leader has their
            # ranks.
            assert order(self.lease) == (release.attempt, head.state.replacement)
            self.released.append(release.attempt)
            return
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


def order(record: ProgressRecord) -> tuple[int, int]:
    return record.attempt, record.replacement


@settings(max_examples=200)
@given(seed=st.integers(0, 2**32 - 1))
@pytest.mark.slow
def test_no_order_of_events_breaks_the_barrier(seed: int) -> None:
    gang = Gang(seed)
    gang.new_attempt()
    for _ in range(STEPS):
        gang.step()


@settings(max_examples=20)
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
        gang.ghost_wakes()
        gang.ghost_reads_the_job()
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
