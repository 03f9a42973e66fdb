"""The state machine of every launcher: owns the ranks of one worker index, obeys the leader.

Invariants for every order of events: ranks of two attempts never live at once; ranks of an attempt are forked at most
once; an index joins an attempt only when its older ranks are dead; an older attempt's directive or release does
nothing.
"""

from __future__ import annotations

import dataclasses
from enum import StrEnum
from typing import TypeAlias

from polyreme_api.exit_codes import ExitCode
from polyreme_api.rank_state import RankState
from polyreme_launcher.protocol.messages import (
    Beat,
    Check,
    Checked,
    Directive,
    Exited,
    Finish,
    Joined,
    Leaving,
    Message,
    Release,
    WriteStacks,
)

LEADER_SILENCE_MAX_S = 15.0
"""A follower that receives nothing from the leader for this long ends its ranks and joins again."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderConnected:
    """The leader is connected and authenticated."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LeaderLost:
    """The connection to the leader broke."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FromLeader:
    """A message of the leader."""

    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankExited:
    """A rank of this index ended and is reaped. Comes exactly once for every rank that ``ForkRanks`` asked for."""

    attempt: int
    rank: int
    code: int | None
    signal: int | None
    message: str = ""
    """Its last message, if it ended by an error of its own."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RanksSampled:
    """Pages and processes of the living ranks were looked at."""

    states: tuple[RankState, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CheckEnded:
    """The processes of a check have ended."""

    attempt: int
    serial: int
    report: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Tick:
    """Time passed; sent at least every second."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopRequested:
    """The pod is being terminated (SIGTERM). After a second request it ends without a checkpoint."""

    grace_s: float
    """Time that ranks have to checkpoint; then they are killed."""


FollowerEvent: TypeAlias = (
    LeaderConnected | LeaderLost | FromLeader | RankExited | RanksSampled | CheckEnded | Tick | StopRequested
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SendToLeader:
    """Send this to the leader; dropped if there is no connection (important messages are repeated on the next)."""

    message: Message


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ForkRanks:
    """Start the ranks of this index."""

    directive: Directive
    release: Release


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KillRanks:
    """End every rank with SIGKILL, even a stopped one."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RunCheck:
    """Start the processes of a check, and kill those of an older one; ``CheckEnded`` answers."""

    check: Check


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StopChecks:
    """Kill the processes of checks, also those where pairs meet."""


class RankSignal(StrEnum):
    """Requests to ranks, without force."""

    CHECKPOINT = "Checkpoint"
    """Checkpoint after this step and continue."""
    STOP = "Stop"
    """Checkpoint after this step and exit."""
    STACKS = "Stacks"
    """Write the stacks of all threads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SignalRanks:
    """Send the request to the ranks."""

    signal: RankSignal


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ExitProcess:
    """End the launcher."""

    code: int


FollowerEffect: TypeAlias = SendToLeader | RunCheck | StopChecks | ForkRanks | KillRanks | SignalRanks | ExitProcess


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FollowerState:
    """State of a launcher and its own ranks."""

    index: int
    replacement: int
    devices: int
    """Ranks of this index."""
    launcher: str = ""
    """Name of this process, by which a leader tells it from another one of the same place."""
    directive: Directive | None = None
    """The newest attempt received."""
    live: frozenset[int] = frozenset()
    """Living ranks, by global rank."""
    forked_attempt: int = 0
    """Newest attempt whose ranks were forked here."""
    exits: tuple[Exited, ...] = ()
    """Exits of that attempt's ranks, repeated to a leader that reconnects."""
    heard_at_s: float | None = None
    """When the leader last sent a message; None before the first."""
    connected: bool = False
    ending_code: int | None = None
    """Set when the launcher itself shall end, as soon as no rank lives."""
    sample: RanksSampled | None = None
    """The newest sample of the living ranks."""
    kill_at_s: float | None = None
    """When ranks that were asked to stop are killed."""
    check: Check | None = None
    """The newest check of this attempt."""
    checked: Checked | None = None
    """Its result, repeated to a leader that asks again."""

    @property
    def attempt(self) -> int:
        """The newest attempt received, 0 before the first."""
        return 0 if self.directive is None else self.directive.attempt

    @property
    def ranks(self) -> range:
        """Global ranks of this index."""
        return range(self.index * self.devices, (self.index + 1) * self.devices)


Step: TypeAlias = tuple[FollowerState, tuple[FollowerEffect, ...]]


class FollowerMachine:
    """``step(state, event, now_s) -> (state, effects)``: pure."""

    @staticmethod
    def step(state: FollowerState, event: FollowerEvent, now_s: float) -> Step:
        """Take one event."""
        match event:
            case LeaderConnected():
                return _on_connected(state, now_s)
            case LeaderLost():
                return dataclasses.replace(state, connected=False), ()
            case FromLeader(message=message):
                heard = dataclasses.replace(state, heard_at_s=now_s)
                return _on_message(heard, message)
            case RankExited():
                return _on_exit(state, event)
            case CheckEnded():
                return _on_check_ended(state, event)
            case RanksSampled():
                return (state, ()) if event == state.sample else (dataclasses.replace(state, sample=event), ())
            case Tick():
                return _on_tick(state, now_s)
            case StopRequested(grace_s=grace_s):
                return _on_stop(state, now_s + grace_s)


def _on_connected(state: FollowerState, now_s: float) -> Step:
    # A connection alone does not count: a leader that drops this launcher each time must keep none of its ranks alive.
    heard_at_s = now_s if state.heard_at_s is None else state.heard_at_s
    state = dataclasses.replace(state, connected=True, heard_at_s=heard_at_s)
    return state, _joined(state)


def _on_message(state: FollowerState, message: Message) -> Step:
    if state.ending_code is not None:
        return state, ()
    match message:
        case Directive():
            return _on_directive(state, message)
        case Check():
            return _on_check(state, message)
        case Release():
            return _on_release(state, message)
        case WriteStacks(attempt=attempt):
            asked = state.live and attempt == state.forked_attempt
            return state, (SignalRanks(signal=RankSignal.STACKS),) if asked else ()
        case Finish(code=code):
            return _end(state, code)
        case _:
            return state, ()


def _on_directive(state: FollowerState, directive: Directive) -> Step:
    if directive.attempt < state.attempt:
        return state, ()
    if directive.replacement > state.replacement:
        # Another pod has this place now: this one is fenced off, whatever it still runs.
        return _end(dataclasses.replace(state, directive=directive), ExitCode.FENCED)
    before = state.directive
    state = dataclasses.replace(state, directive=directive)
    stop: tuple[FollowerEffect, ...] = ()
    if before is None or directive.attempt > before.attempt or not directive.run:
        state, stop = _without_check(state)
    if before is None or directive.attempt > before.attempt:
        return (state, (*stop, KillRanks())) if state.live else (state, (*stop, *_joined(state)))
    return state, (*stop, *_asked(before, directive, live=bool(state.live)), *_joined(state))


def _asked(before: Directive, now: Directive, *, live: bool) -> tuple[FollowerEffect, ...]:
    """Requests to the ranks that follow from a change within one attempt."""
    if not live:
        return ()
    if before.run and not now.run:
        return (SignalRanks(signal=RankSignal.STOP),) if now.checkpoint_requested else (KillRanks(),)
    if now.run and now.checkpoint_requested and not before.checkpoint_requested:
        return (SignalRanks(signal=RankSignal.CHECKPOINT),)
    return ()


def _on_release(state: FollowerState, release: Release) -> Step:
    directive = state.directive
    if directive is None or release.attempt != directive.attempt or not directive.run:
        return state, ()
    if state.live or state.forked_attempt >= directive.attempt:
        return state, ()
    state, stop = _without_check(state)
    forked = dataclasses.replace(
        state, live=frozenset(state.ranks), forked_attempt=directive.attempt, exits=(), sample=None, kill_at_s=None
    )
    return forked, (*stop, ForkRanks(directive=directive, release=release))


def _on_check(state: FollowerState, check: Check) -> Step:
    directive, known = state.directive, state.check
    if directive is None or check.attempt != directive.attempt or not directive.run:
        return state, ()
    if state.live or state.forked_attempt >= directive.attempt:
        return state, ()
    if known is not None and check.serial <= known.serial:
        again = check.serial == known.serial and state.checked is not None
        return state, (SendToLeader(message=state.checked),) if again and state.checked is not None else ()
    return dataclasses.replace(state, check=check, checked=None), (RunCheck(check=check),)


def _on_check_ended(state: FollowerState, event: CheckEnded) -> Step:
    known = state.check
    if known is None or (event.attempt, event.serial) != (known.attempt, known.serial) or state.checked is not None:
        return state, ()
    checked = Checked(attempt=event.attempt, serial=event.serial, report=event.report)
    return dataclasses.replace(state, checked=checked), (SendToLeader(message=checked),)


def _without_check(state: FollowerState) -> Step:
    """End the checks of this attempt, if there are any."""
    if state.check is None:
        return state, ()
    return dataclasses.replace(state, check=None, checked=None), (StopChecks(),)


def _on_exit(state: FollowerState, event: RankExited) -> Step:
    if event.attempt != state.forked_attempt or event.rank not in state.live:
        return state, ()
    exited = Exited(attempt=event.attempt, rank=event.rank, code=event.code, signal=event.signal, message=event.message)
    state = dataclasses.replace(state, live=state.live - {event.rank}, exits=(*state.exits, exited))
    effects: tuple[FollowerEffect, ...] = (SendToLeader(message=exited),)
    if state.live:
        return state, effects
    if state.ending_code is not None:
        return state, (*effects, ExitProcess(code=state.ending_code))
    if state.attempt > state.forked_attempt:
        return state, (*effects, *_joined(state))
    return state, effects


def _on_tick(state: FollowerState, now_s: float) -> Step:
    if state.kill_at_s is not None and now_s >= state.kill_at_s:
        if not state.live and state.ending_code is not None:
            return state, (ExitProcess(code=state.ending_code),)
        return state, (KillRanks(),)
    if state.live and state.heard_at_s is not None and now_s - state.heard_at_s > LEADER_SILENCE_MAX_S:
        return state, (KillRanks(),)
    return state, (SendToLeader(message=_beat(state)),) if state.connected else ()


def _beat(state: FollowerState) -> Beat:
    if not state.live or state.sample is None or state.attempt != state.forked_attempt:
        return Beat()
    return Beat(ranks=tuple(number for rank in state.sample.states for number in rank.numbers()))


def _on_stop(state: FollowerState, kill_at_s: float) -> Step:
    if state.ending_code is not None:
        return state, (KillRanks(),) if state.live else ()
    state = dataclasses.replace(state, ending_code=ExitCode.OK, kill_at_s=kill_at_s)
    leaving = (SendToLeader(message=Leaving()),) if state.connected else ()
    if not state.live:
        return state, (ExitProcess(code=ExitCode.OK),)
    if state.directive is not None and (state.directive.run or state.directive.checkpoint_requested):
        # A request to stop is passed on in the next step's all-reduce: the whole gang checkpoints and stops after it.
        return state, (*leaving, SignalRanks(signal=RankSignal.STOP))
    return state, (*leaving, KillRanks())


def _end(state: FollowerState, code: int) -> Step:
    state = dataclasses.replace(state, ending_code=code)
    return state, (KillRanks(),) if state.live else (ExitProcess(code=code),)


def _joined(state: FollowerState) -> tuple[FollowerEffect, ...]:
    """Report the state of this index to the leader: joined, and which ranks have ended."""
    if state.directive is None or not state.connected:
        return ()
    forked = state.forked_attempt == state.attempt
    if state.live and not forked:
        return ()
    joined = Joined(
        attempt=state.attempt,
        index=state.index,
        replacement=state.replacement,
        launcher=state.launcher,
        forked=forked,
    )
    again = state.exits if forked else ()
    return (SendToLeader(message=joined), *(SendToLeader(message=exited) for exited in again))
