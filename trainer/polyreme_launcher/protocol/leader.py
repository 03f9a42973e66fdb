"""The state machine of index 0's launcher: follows ``status.attempt``, holds the barrier, keeps the job's Lease.

Invariants for every order of events: an attempt is released only when every index has joined it with the right
replacement, the checks of its nodes are done, its resume point is fixed by this leader, and the Lease says so (every
reader of the Lease then knows that ranks may live); never for an older attempt than the newest seen; success is
reported only when every rank of every index exited 0 and rank 0's last record said so.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import TypeAlias

from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import MESSAGE_CHARACTERS_MAX, Outcome, ProgressRecord, RankExit, RankPhase
from polyreme_launcher.protocol import check_rounds as rounds
from polyreme_launcher.protocol import rank_watch
from polyreme_launcher.protocol.follower import Tick
from polyreme_launcher.protocol.leader_events import (
    AttemptRefused,
    AttemptView,
    Broadcast,
    ChecksMeet,
    DropPeer,
    Fenced,
    FixResume,
    FromPeer,
    JobChanged,
    LeaderEffect,
    LeaderEvent,
    LeaseWritten,
    MeetForChecks,
    PeerConnected,
    PeerLost,
    ProgressFromRank,
    RenewLease,
    ResumeFixed,
    SendTo,
)
from polyreme_launcher.protocol.messages import Beat, Checked, Exited, Finish, Joined, Leaving, WriteStacks
from polyreme_launcher.protocol.records import (
    concluded,
    is_urgent,
    with_leaving,
    with_rank_record,
)

__all__ = [
    "AttemptRefused",
    "AttemptView",
    "Broadcast",
    "ChecksMeet",
    "DropPeer",
    "Fenced",
    "FixResume",
    "FromPeer",
    "JobChanged",
    "LeaderEffect",
    "LeaderEvent",
    "LeaderMachine",
    "LeaderState",
    "LeaseWritten",
    "MeetForChecks",
    "PeerConnected",
    "PeerLost",
    "ProgressFromRank",
    "RenewLease",
    "ResumeFixed",
    "SendTo",
]

RENEW_EVERY_S = 2.0
"""Interval of Lease renewals when nothing urgent happens, and of beats to followers."""
FOLLOWER_SILENCE_MAX_S = 20.0
"""A connected follower that is silent for this long, such as a stopped one, loses its place."""
CAUSE_WAIT_S = 2.0
"""How long exits of ranks that lost another are withheld: that one's exit, or its pod's end, shows the cause."""
TICK_GAP_MAX_S = 5.0
"""After a longer pause between two ticks, the leader itself was stopped: the followers' messages are still unread."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderState:
    """State of the leader and its gang."""

    replacement: int
    """Replacement number of the leader's own pod."""
    attempt: AttemptView | None = None
    peers: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """Replacement number of the connected launcher, by index."""
    joined: frozenset[int] = frozenset()
    launchers: Mapping[int, str] = dataclasses.field(default_factory=dict)
    """The process that joined last, by index; after the release, the processes that received it."""
    checks: rounds.Rounds | None = None
    """Checks of the nodes; None: not begun, or begun again when every index has joined."""
    check_serial: int = 0
    """Serial number of the newest round."""
    resume: ResumeFixed | None = None
    fixing: bool = False
    released: bool = False
    """Whether the barrier is passed, and the Lease shall record it."""
    announced: bool = False
    """Whether the Lease records it, and the followers were notified."""
    exits: Mapping[int, Exited] = dataclasses.field(default_factory=dict)
    """Exits of this attempt's ranks, by rank."""
    ended_at_s: float = float("-inf")
    """When the first of them was received."""
    waited_for_cause: bool = False
    """Whether exits of ranks that lost another have been withheld for as long as they may."""
    heard: Mapping[int, float] = dataclasses.field(default_factory=dict)
    """When each index last sent a message, since it connected."""
    ticked_at_s: float = float("-inf")
    ranks: rank_watch.RankWatch = dataclasses.field(default_factory=rank_watch.RankWatch)
    success_recorded: bool = False
    """Whether rank 0's last record says that the attempt succeeded."""
    record: ProgressRecord | None = None
    renewed_at_s: float = float("-inf")
    beat_at_s: float = float("-inf")
    finished: bool = False
    """Whether the launchers were asked to end."""


Step: TypeAlias = tuple[LeaderState, tuple[LeaderEffect, ...]]


class LeaderMachine:
    """``step(state, event, now_s) -> (state, effects)``: pure."""

    @staticmethod
    def step(state: LeaderState, event: LeaderEvent, now_s: float) -> Step:
        """Take one event."""
        if state.finished:
            return state, ()
        before = state.record
        if isinstance(event, FromPeer | PeerConnected):
            state = dataclasses.replace(state, heard={**state.heard, event.index: now_s})
        after, effects = _dispatch(state, event, now_s)
        if after.record is None or after.finished:
            return after, effects
        if is_urgent(before, after.record):
            renewed = dataclasses.replace(after, renewed_at_s=now_s)
            return renewed, (*effects, RenewLease(record=after.record))
        return after, effects


def _dispatch(state: LeaderState, event: LeaderEvent, now_s: float) -> Step:
    match event:
        case JobChanged(attempt=attempt):
            return _on_job(state, attempt)
        case PeerConnected():
            return _on_connected(state, event)
        case PeerLost():
            return _on_lost(state, event)
        case FromPeer():
            return _on_peer(state, event, now_s)
        case ResumeFixed() | ChecksMeet():
            return _on_resume(state, event) if isinstance(event, ResumeFixed) else _on_checks_meet(state, event)
        case AttemptRefused():
            return _on_refused(state, event)
        case ProgressFromRank(record=record):
            return _on_progress(state, record), ()
        case LeaseWritten(record=record):
            return _on_written(state, record)
        case Fenced(attempt=number):
            current = number is None or (state.attempt is not None and number == state.attempt.number)
            return _finish(state, ExitCode.FENCED) if current else (state, ())
        case Tick():
            return _on_tick(state, now_s)


def _on_job(state: LeaderState, attempt: AttemptView) -> Step:
    if attempt.replacement(0) > state.replacement:
        return _finish(state, ExitCode.FENCED)
    known = state.attempt
    refused = state.record.attempt if known is None and state.record is not None else 0
    if attempt.number <= refused or (known is not None and attempt.number < known.number):
        return state, ()
    if known is not None and attempt.number == known.number:
        state = dataclasses.replace(state, attempt=attempt)
        if (known.run, known.checkpoint_requested) == (attempt.run, attempt.checkpoint_requested):
            return state, ()
        return _settle(state, tuple(SendTo(index=index, message=attempt.directive(index)) for index in state.peers))
    record = ProgressRecord(attempt=attempt.number, replacement=state.replacement)
    old = {index: number for index, number in state.peers.items() if number < attempt.replacement(index)}
    state = LeaderState(
        replacement=state.replacement,
        attempt=attempt,
        peers={index: number for index, number in state.peers.items() if index not in old and index < attempt.replicas},
        record=record,
        renewed_at_s=state.renewed_at_s,
        beat_at_s=state.beat_at_s,
    )
    drops = tuple(effect for index, number in old.items() for effect in _dismiss(attempt, index, number))
    return _settle(state, (*drops, *(SendTo(index=index, message=attempt.directive(index)) for index in state.peers)))


def _dismiss(attempt: AttemptView, index: int, replacement: int) -> tuple[LeaderEffect, ...]:
    """Close the connection of an outdated pod; one whose place is gone for good has nothing left to do."""
    drop = DropPeer(index=index, replacement=replacement)
    return (drop,) if index < attempt.replicas else (SendTo(index=index, message=Finish(code=ExitCode.OK)), drop)


def _on_connected(state: LeaderState, event: PeerConnected) -> Step:
    attempt = state.attempt
    drop = DropPeer(index=event.index, replacement=event.replacement)
    if event.replacement < state.peers.get(event.index, 0):
        return state, (drop,)
    if attempt is not None and event.replacement < attempt.replacement(event.index):
        # When it learns that another pod has its place, it ends its ranks at once, without waiting for the silence
        # limit.
        fence = SendTo(index=event.index, message=attempt.directive(event.index))
        return state, (drop,) if event.index in state.peers else (fence, drop)
    peers = {**state.peers, event.index: event.replacement}
    # A new connection of an index reports its state again; until then it has not joined.
    joined = state.joined if state.released else state.joined - {event.index}
    state = _counted(dataclasses.replace(state, peers=peers, joined=joined))
    if attempt is None or event.index >= attempt.replicas:
        return state, ()
    return state, (SendTo(index=event.index, message=attempt.directive(event.index)),)


def _on_lost(state: LeaderState, event: PeerLost) -> Step:
    if state.peers.get(event.index) != event.replacement:
        return state, ()
    peers = {index: number for index, number in state.peers.items() if index != event.index}
    joined = state.joined if state.released else state.joined - {event.index}
    return _counted(dataclasses.replace(state, peers=peers, joined=joined)), ()


def _on_peer(state: LeaderState, event: FromPeer, now_s: float) -> Step:
    attempt, message = state.attempt, event.message
    if attempt is None or state.peers.get(event.index) != event.replacement:
        return state, ()
    match message:
        case Joined() if message.attempt == attempt.number and message.index == event.index:
            return _on_joined(state, attempt, message)
        case Checked() if message.attempt == attempt.number and state.checks is not None:
            return _with_checks(state, rounds.take(state.checks, event.index, message.serial, message.report))
        case Exited() if message.attempt == attempt.number and message.rank // attempt.devices == event.index:
            return _on_exited(state, message, now_s)
        case Beat() if state.announced and event.index < attempt.replicas:
            return _on_beat(state, event.index, message), ()
        case Leaving() if event.index < attempt.replicas:
            return _on_leaving(state, event.index), ()
        case _:
            return state, ()


def _on_beat(state: LeaderState, index: int, beat: Beat) -> LeaderState:
    # The state at the first rank's failure is the cause; the others end because of it.
    if state.record is None or _has_failed(state):
        return state
    ranks = rank_watch.take(state.ranks, index, beat.ranks)
    return dataclasses.replace(state, ranks=ranks, record=rank_watch.on_record(state.record, ranks))


def _look_at_ranks(state: LeaderState, now_s: float) -> Step:
    attempt, record = state.attempt, state.record
    if attempt is None or record is None or not (state.announced and attempt.run) or _has_failed(state):
        return state, ()
    ranks = rank_watch.look(state.ranks, attempt, state.heard, now_s, ended=len(state.exits))
    asks = ranks.hang.stall is not None and state.ranks.hang.stall is None
    state = dataclasses.replace(state, ranks=ranks, record=rank_watch.on_record(record, ranks))
    return state, (Broadcast(message=WriteStacks(attempt=attempt.number)),) if asks else ()


def _has_failed(state: LeaderState) -> bool:
    return any(exited.code != ExitCode.OK for exited in state.exits.values())


def _on_leaving(state: LeaderState, index: int) -> LeaderState:
    record = None if state.record is None else with_leaving(state.record, index)
    return dataclasses.replace(state, record=record)


def _on_joined(state: LeaderState, attempt: AttemptView, joined: Joined) -> Step:
    if joined.replacement != attempt.replacement(joined.index) or joined.index >= attempt.replicas:
        return state, ()
    launchers = {**state.launchers, joined.index: joined.launcher}
    if state.released:
        if not state.announced:
            return dataclasses.replace(state, launchers=launchers), ()
        if joined.launcher != state.launchers.get(joined.index):
            return _on_other_process(state, joined), ()
        if joined.forked or state.resume is None:
            return state, ()
        # The connection broke between release and fork: the ranks of this index still wait for it.
        return state, (SendTo(index=joined.index, message=state.resume.release()),)
    state = _counted(dataclasses.replace(state, joined=state.joined | {joined.index}, launchers=launchers))
    if state.checks is not None and attempt.checks is not None:
        # The connection broke during a check: it may not have heard of it, or its report may be lost.
        check = rounds.message(state.checks, attempt.checks, attempt.number, joined.index)
        if check is not None:
            return _settle(state, (SendTo(index=joined.index, message=check),))
    return _settle(state, ())


def _on_checks_meet(state: LeaderState, event: ChecksMeet) -> Step:
    attempt = state.attempt
    if attempt is None or event.attempt != attempt.number or state.checks is None or state.released:
        return state, ()
    return _with_checks(state, rounds.met(state.checks, event.serial, event.address, event.port), asks=True)


def _with_checks(state: LeaderState, checks: rounds.Rounds, *, asks: bool = False) -> Step:
    """Take a new state of the checks: ask the workers of a round that begins, and report.

    Args:
        state: The leader's.
        checks: The new state.
        asks: Whether a round begins although its number is the same.
    """
    attempt, record = state.attempt, state.record
    if attempt is None or record is None or attempt.checks is None or record.outcome is not None:
        return state, ()
    before = state.checks
    checks = rounds.advance(checks, attempt.checks)
    report = rounds.report_of(checks)
    changes: dict[str, object] = {"pre_check": report}
    if checks.bad and checks.done and not attempt.checks.warn_only:
        message = "; ".join(f"worker {each.index}: {each.message}" for each in report.failed)
        changes |= {"outcome": Outcome.FAILED, "message": message[:MESSAGE_CHARACTERS_MAX]}
    state = dataclasses.replace(
        state, checks=checks, check_serial=checks.serial, record=record.model_copy(update=changes)
    )
    if checks.done:
        return (state, ()) if "outcome" in changes else _settle(state, ())
    if not asks and before is not None and before.serial == checks.serial:
        return state, ()
    if checks.needs_address:
        seconds = math.ceil(attempt.checks.round_s)
        return state, (MeetForChecks(attempt=attempt.number, serial=checks.serial, seconds=seconds),)
    asked = ((index, rounds.message(checks, attempt.checks, attempt.number, index)) for index in checks.members)
    return state, tuple(SendTo(index=index, message=check) for index, check in asked if check is not None)


def _on_other_process(state: LeaderState, joined: Joined) -> LeaderState:
    """Fail the attempt: a pod that was created late or again would run the second ranks of its place."""
    if state.record is None or state.record.outcome is not None:
        return state
    message = f"worker {joined.index}: its pod was created again within the attempt"
    record = state.record.model_copy(update={"outcome": Outcome.FAILED, "message": message})
    return dataclasses.replace(state, record=record)


def _counted(state: LeaderState) -> LeaderState:
    if state.record is None or state.record.joined == len(state.joined):
        return state
    return dataclasses.replace(state, record=state.record.model_copy(update={"joined": len(state.joined)}))


def _on_resume(state: LeaderState, event: ResumeFixed) -> Step:
    if state.attempt is None or event.attempt != state.attempt.number or state.resume is not None:
        return state, ()
    return _settle(dataclasses.replace(state, resume=event, fixing=False), ())


def _on_refused(state: LeaderState, event: AttemptRefused) -> Step:
    """Report it as rank 0's exit, which the operator judges by its code."""
    known = 0 if state.record is None else state.record.attempt
    if event.attempt < known or (event.attempt == known and (state.released or state.attempt is None)):
        return state, ()
    record = ProgressRecord(
        attempt=event.attempt,
        replacement=state.replacement,
        exits=(RankExit(rank=0, code=event.code),),
        outcome=Outcome.FAILED,
        message=event.message[:MESSAGE_CHARACTERS_MAX],
    )
    # No attempt is followed until the next one: nothing of this one may be joined, fixed or released.
    refused = LeaderState(
        replacement=state.replacement,
        peers=state.peers,
        record=record,
        renewed_at_s=state.renewed_at_s,
        beat_at_s=state.beat_at_s,
    )
    return refused, ()


def _on_exited(state: LeaderState, exited: Exited, now_s: float) -> Step:
    if exited.rank in state.exits:
        return state, ()
    ended_at_s = state.ended_at_s if state.exits else now_s
    attempt, record = state.attempt, state.record
    if attempt is not None and record is not None and not state.exits and exited.code == ExitCode.ENVIRONMENT:
        state = dataclasses.replace(state, record=rank_watch.after_exit(record, state.ranks, attempt, now_s))
    state = dataclasses.replace(state, exits={**state.exits, exited.rank: exited}, ended_at_s=ended_at_s)
    return _settle(state, ())


def _settle(state: LeaderState, effects: tuple[LeaderEffect, ...]) -> Step:
    """Do what has become due: fix the resume point, pass the barrier, report how the attempt ended."""
    attempt, record = state.attempt, state.record
    if attempt is None or record is None:
        return state, effects
    gathered = len(state.joined) == attempt.replicas
    if not (attempt.run and gathered and not state.released):
        ended = concluded(
            record,
            state.exits,
            run=attempt.run,
            ranks=attempt.replicas * attempt.devices,
            devices=attempt.devices,
            announced=state.announced,
            success_recorded=state.success_recorded,
            cause_may_come=not state.waited_for_cause,
        )
        return dataclasses.replace(state, record=ended), effects
    if attempt.checks is not None and (state.checks is None or not state.checks.done):
        if state.checks is not None or record.outcome is not None:
            return state, effects
        begun = rounds.begin(attempt.checks, replicas=attempt.replicas, serial=state.check_serial + 1)
        checking, asked = _with_checks(state, begun)
        return checking, (*effects, *asked)
    if record.outcome is not None:
        return state, effects
    if (resume := state.resume) is not None:
        record = record.model_copy(update={"released": True, "resumed_from_step": resume.step})
        return dataclasses.replace(state, released=True, record=record), effects
    if state.fixing:
        return state, effects
    return dataclasses.replace(state, fixing=True), (*effects, FixResume(attempt=attempt.number))


def _on_progress(state: LeaderState, record: ProgressRecord) -> LeaderState:
    if state.record is None or record.attempt != state.record.attempt or state.record.outcome is not None:
        return state
    merged = with_rank_record(state.record, record)
    succeeded = record.outcome is Outcome.SUCCEEDED or record.phase is RankPhase.DONE
    return dataclasses.replace(state, record=merged, success_recorded=succeeded)


def _on_written(state: LeaderState, record: ProgressRecord) -> Step:
    attempt = state.attempt
    if attempt is None or record.attempt != attempt.number:
        return state, ()
    if record.outcome is Outcome.SUCCEEDED:
        return _finish(state, ExitCode.OK)
    if not (record.released and attempt.run) or state.announced or state.resume is None:
        return state, ()
    return dataclasses.replace(state, announced=True), (Broadcast(message=state.resume.release()),)


def _finish(state: LeaderState, code: int) -> Step:
    """End every launcher after success; end only this one when it is fenced, the others wait for its successor."""
    finish = Finish(code=code)
    effect: LeaderEffect = Broadcast(message=finish) if code == ExitCode.OK else SendTo(index=0, message=finish)
    return dataclasses.replace(state, finished=True), (effect,)


def _on_tick(state: LeaderState, now_s: float) -> Step:
    effects: list[LeaderEffect] = []
    if now_s - state.beat_at_s >= RENEW_EVERY_S:
        state = dataclasses.replace(state, beat_at_s=now_s)
        effects.append(Broadcast(message=Beat()))
    state = _without_silent(state, now_s)
    state, checking = _check_on_tick(state, now_s)
    state, looked = _look_at_ranks(state, now_s)
    effects += (*checking, *looked)
    if state.exits and not state.waited_for_cause and now_s - state.ended_at_s >= CAUSE_WAIT_S:
        state, due = _settle(dataclasses.replace(state, waited_for_cause=True), ())
        effects += due
    record = state.record
    if record is not None and now_s - state.renewed_at_s >= RENEW_EVERY_S:
        state = dataclasses.replace(state, renewed_at_s=now_s)
        effects.append(RenewLease(record=record))
    return state, tuple(effects)


def _check_on_tick(state: LeaderState, now_s: float) -> Step:
    attempt, checks = state.attempt, state.checks
    if attempt is None or attempt.checks is None or checks is None or checks.done or not attempt.run:
        return state, ()
    if len(state.joined) < attempt.replicas:
        # A worker that has lost its connection says nothing about its node: begin again when it is back.
        return dataclasses.replace(state, checks=None), ()
    after = rounds.tick(checks, attempt.checks, now_s)
    return _with_checks(state, after) if after is not checks else (state, ())


def _without_silent(state: LeaderState, now_s: float) -> LeaderState:
    """Fail the attempt if a follower fell silent: its ranks may still train, but their exits would go unreported."""
    stood_still = now_s - state.ticked_at_s > TICK_GAP_MAX_S
    heard = dict.fromkeys(state.heard, now_s) if stood_still else state.heard
    state = dataclasses.replace(state, ticked_at_s=now_s, heard=heard)
    record = state.record
    if record is None or not state.announced or record.outcome is not None or record.exits:
        return state
    silent = [index for index in state.peers if now_s - heard.get(index, now_s) > FOLLOWER_SILENCE_MAX_S]
    if not silent:
        return state
    message = f"worker {silent[0]}: its launcher has sent nothing for {FOLLOWER_SILENCE_MAX_S:g} s"
    failed = with_leaving(record, silent[0]).model_copy(update={"outcome": Outcome.FAILED, "message": message})
    return dataclasses.replace(state, record=failed)
