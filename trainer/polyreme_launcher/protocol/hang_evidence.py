"""Evidence of a hang: a pure function of what the launchers see of all ranks, without clock or I/O.

Two signals are asked for before ranks are restarted. The first is time: no rank's page has advanced for longer than the
deadline of what the ranks that hold up the others are busy with. A deadline is ``FACTOR`` times the longest pause that
this attempt has got over in the same activity, at least a floor, and at most a cap that the job states; until an
activity has been seen to advance, it is the cap. The second signal is a relation between ranks, or what the kernel
says: some wait for others that are in no exchange or have entered fewer, all wait, a process is stopped, or none uses
CPU time. Ranks that all compute give no second signal, however long that takes.

The detector is armed only while it sees every rank; all that it has learned belongs to one attempt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from polyreme_api.progress import (
    EXITS_MAX,
    RANKS_NAMED_MAX,
    STALL_CHARACTERS_MAX,
    StallEvidence,
    StallKind,
    name_stopped,
)
from polyreme_api.rank_state import RankActivity, RankState, RankWait

FACTOR = 5.0
"""How many times the longest pause so far a pause may be."""
STEP_FLOOR_S = 60.0
"""Least deadline inside a step: networks and stores that come back do so sooner."""
OTHER_FLOOR_S = 300.0
"""Least deadline outside steps, where ranks load, save, answer or write."""
LEARNED_AFTER = 3
"""Times that an activity must have advanced before its pauses count."""
STOPPED_REPORTED_S = 10.0
"""A stopped process is reported after this time, since it is certain, but restarted no earlier than another one."""
LOOK_GAP_MAX_S = 5.0
"""After a longer time between two looks the observer itself was stopped: that time counts for nothing."""
GAVE_UP_AFTER_S = 8.0
"""A rank that ends after a shorter time without an advance lost another rank rather than gave up waiting for it."""
ENDS_WITHIN_S = 30.0
"""How long a rank may take to end after all of its work: communicators and drivers may hang while they close."""
CONFIRMED_AFTER_S = 2.0
"""Time from the first report, when stacks are asked for, to its confirmation by another look."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HangLimits:
    """Caps of the deadlines, from the job."""

    step_s: float = 600.0
    first_step_s: float = 600.0
    data_wait_s: float = 600.0

    def cap_s(self, activity: RankActivity) -> float:
        """Return the longest time without any advance that is allowed."""
        match activity:
            case RankActivity.STEP:
                return self.step_s
            case RankActivity.DATA_WAIT:
                return self.step_s + self.data_wait_s
            case RankActivity.STARTING:
                return max(self.step_s, self.first_step_s) + self.data_wait_s
            case _:
                return max(self.step_s, self.first_step_s)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HangWatch:
    """What is known of an attempt."""

    moves: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """By rank, at the last look."""
    moved_at_s: float | None = None
    """When a rank was last seen to advance; None: not all ranks are seen."""
    busy_with: frozenset[RankActivity] = frozenset()
    """What those were busy with at the last look that held up the others."""
    looked_at_s: float | None = None
    advances: Mapping[RankActivity, int] = dataclasses.field(default_factory=dict)
    """Looks at which an activity had advanced."""
    longest_s: Mapping[RankActivity, float] = dataclasses.field(default_factory=dict)
    """Longest pause that was got over, by activity."""
    reported_at_s: float | None = None
    """When the present stall was first reported."""
    stall: StallEvidence | None = None

    @property
    def armed(self) -> bool:
        """Whether a hang would be found."""
        return self.moved_at_s is not None


def look(
    watch: HangWatch, ranks: Sequence[RankState], now_s: float, *, world: int, limits: HangLimits, devices: int, pp: int
) -> HangWatch:
    """Take one look at all ranks.

    Args:
        watch: What was known.
        ranks: Their states, as new as they are.
        now_s: Steady time of the observer.
        world: Ranks of the attempt that have not ended.
        limits: Caps of the deadlines.
        devices: Ranks of a worker.
        pp: Ranks of a pipeline.
    """
    watched = [rank for rank in ranks if rank.watched]
    gap_s = 0.0 if watch.looked_at_s is None else now_s - watch.looked_at_s
    watch = dataclasses.replace(watch, looked_at_s=now_s)
    moves = {rank.rank: rank.moves for rank in watched}
    if not moves or len(moves) < world:  # none: all have ended
        return dataclasses.replace(watch, moves=moves, moved_at_s=None, reported_at_s=None, stall=None)
    if watch.moved_at_s is None or moves != watch.moves:
        return _advanced(watch, moves, watched, now_s)
    if gap_s > LOOK_GAP_MAX_S:
        watch = dataclasses.replace(watch, moved_at_s=watch.moved_at_s + gap_s)
    return _still(watch, watched, now_s, limits=limits, devices=devices, pp=pp)


def _advanced(watch: HangWatch, moves: Mapping[int, int], ranks: Sequence[RankState], now_s: float) -> HangWatch:
    """Learn the pause that has just ended, for what those were busy with that held it up."""
    advances, longest_s = dict(watch.advances), dict(watch.longest_s)
    activities = frozenset(rank.activity for rank in ranks)
    if watch.moved_at_s is not None:
        for activity in activities:
            advances[activity] = advances.get(activity, 0) + 1
        for activity in watch.busy_with:
            longest_s[activity] = max(longest_s.get(activity, 0.0), now_s - watch.moved_at_s)
    return dataclasses.replace(
        watch,
        moves=moves,
        moved_at_s=now_s,
        busy_with=activities,
        advances=advances,
        longest_s=longest_s,
        reported_at_s=None,
        stall=None,
    )


def _still(
    watch: HangWatch, ranks: Sequence[RankState], now_s: float, *, limits: HangLimits, devices: int, pp: int
) -> HangWatch:
    """Judge ranks that have not advanced since the last look."""
    assert watch.moved_at_s is not None
    # Two clocks: the observer's own between looks, and that of the ranks' pages; the shorter time counts.
    quiet_s = min(now_s - watch.moved_at_s, min(rank.quiet_ms for rank in ranks) / 1000)
    kind, suspects = accuse(ranks, pp=pp)
    of_suspects = [rank for rank in ranks if rank.rank in suspects] or ranks
    watch = dataclasses.replace(watch, busy_with=frozenset(rank.activity for rank in of_suspects))
    deadline_s = max(deadline_of(watch, activity, limits) for activity in watch.busy_with)
    reported_s = min(deadline_s, STOPPED_REPORTED_S) if kind is StallKind.STOPPED else deadline_s
    if quiet_s < reported_s:
        return watch
    reported_at_s = now_s if watch.reported_at_s is None else watch.reported_at_s
    overdue = quiet_s >= deadline_s
    if watch.stall is not None and (watch.stall.kind, watch.stall.suspects) == (kind, suspects):
        # Only the first report says how long: each other second would be another record.
        confirmed = overdue and kind is not StallKind.BUSY and now_s - reported_at_s >= CONFIRMED_AFTER_S
        return dataclasses.replace(watch, stall=watch.stall.model_copy(update={"confirmed": confirmed}))
    step = min(rank.step for rank in ranks)
    words = f"no rank has advanced for {reported_s:g} s in {_where(of_suspects)}"
    message = f"{words}; {describe(kind, suspects, ranks, devices=devices)}"[:STALL_CHARACTERS_MAX]
    stall = StallEvidence(kind=kind, suspects=suspects, step=step, quiet_seconds=reported_s, message=message)
    return dataclasses.replace(watch, reported_at_s=reported_at_s, stall=stall)


def deadline_of(watch: HangWatch, activity: RankActivity, limits: HangLimits) -> float:
    """Return how long no rank may advance while those that hold up the others are busy with an activity."""
    cap_s = limits.cap_s(activity)
    if activity is RankActivity.FIRST_STEP or watch.advances.get(activity, 0) < LEARNED_AFTER:
        return cap_s
    floor_s = STEP_FLOOR_S if activity is RankActivity.STEP else OTHER_FLOOR_S
    return min(cap_s, max(floor_s, FACTOR * watch.longest_s.get(activity, 0.0)))


def accuse(ranks: Sequence[RankState], *, pp: int) -> tuple[StallKind, tuple[int, ...]]:
    """Say what ranks that do not advance show, and which of them hold up the others."""
    if stopped := _numbers(rank for rank in ranks if rank.stopped):
        return StallKind.STOPPED, stopped
    waiting = [rank for rank in ranks if rank.wait]
    outside = [rank for rank in ranks if not rank.wait]
    if not waiting:
        return (StallKind.IDLE if all(rank.idle for rank in ranks) else StallKind.BUSY), ()
    if outside:
        return StallKind.OUTSIDE, _numbers(outside)
    if unsent := _not_sent(ranks, pp=pp):
        return StallKind.NOT_SENT, unsent
    if fewer := _with_fewer_exchanges(ranks, pp=pp):
        return StallKind.BEHIND, fewer
    return StallKind.ALL_WAIT, ()


def _with_fewer_exchanges(ranks: Sequence[RankState], *, pp: int) -> tuple[int, ...]:
    """Ranks that have entered fewer exchanges than others of the same place in their pipelines.

    Those of one place make the same exchanges in the same order.
    """
    inner = max(1, len(ranks) // pp)
    furthest: dict[int, tuple[int, int]] = {}
    for rank in ranks:
        place = rank.rank // inner
        furthest[place] = max(furthest.get(place, (0, 0)), (rank.step, rank.exchanges))
    return _numbers(rank for rank in ranks if (rank.step, rank.exchanges) < furthest[rank.rank // inner])


def _not_sent(ranks: Sequence[RankState], *, pp: int) -> tuple[int, ...]:
    """Ranks that say they have sent what another one waits for.

    Neighbours in a pipeline are the ranks of equal place in the next block of ranks. Where a rank has several stages,
    its counts of sends belong to no single one, so none is named.
    """
    inner = len(ranks) // pp
    if pp == 1 or any(rank.stage != rank.rank // inner for rank in ranks):
        return ()
    by_rank = {rank.rank: rank for rank in ranks}
    found = []
    for rank in ranks:
        if rank.wait not in {RankWait.FORWARD, RankWait.BACKWARD}:
            continue
        forward = rank.wait is RankWait.FORWARD
        sender = by_rank.get(rank.rank + (-inner if forward else inner))
        if sender is None:
            continue
        count = sender.sent_forward if forward else sender.sent_backward
        if (sender.step, count) > (rank.step, rank.microbatch):
            found.append(sender)
    return _numbers(found)


def describe(kind: StallKind, suspects: Sequence[int], ranks: Sequence[RankState], *, devices: int) -> str:
    """Say in words what ranks show."""
    waiting = sum(bool(rank.wait) for rank in ranks)
    named = name_ranks(suspects, devices=devices)
    plural = len(suspects) != 1
    match kind:
        case StallKind.STOPPED:
            return name_stopped(suspects, devices=devices)
        case StallKind.OUTSIDE:
            others = "another rank waits" if waiting == 1 else f"{waiting} ranks wait"
            return f"{named} {'are' if plural else 'is'} in no exchange, and {others} in one"
        case StallKind.BEHIND:
            return f"{named} {'have' if plural else 'has'} entered fewer exchanges than the ranks of the same stage"
        case StallKind.NOT_SENT:
            return f"{named} passed a send to another pipeline stage, and what it sends did not arrive"
        case StallKind.ALL_WAIT:
            return f"all {waiting} ranks wait for each other in exchanges"
        case StallKind.IDLE:
            return "no rank uses CPU time"
        case StallKind.BUSY:
            return "ranks use CPU time and none waits in an exchange, so nothing confirms a hang"


def name_ranks(ranks: Sequence[int], *, devices: int) -> str:
    """Name ranks, and the worker of a single one."""
    if len(ranks) == 1:
        return f"rank {ranks[0]} on worker {ranks[0] // devices}"
    shown = ", ".join(map(str, ranks[:RANKS_NAMED_MAX]))
    return f"ranks {shown}{f' and {len(ranks) - RANKS_NAMED_MAX} more' if len(ranks) > RANKS_NAMED_MAX else ''}"


_PLACES = {
    RankActivity.STARTING: "their start",
    RankActivity.LOADING: "loading",
    RankActivity.DATA_WAIT: "the wait for data",
    RankActivity.SCORING: "scoring",
    RankActivity.EVALUATING: "evaluation",
    RankActivity.CHECKPOINTING: "a checkpoint",
    RankActivity.EXPORTING: "export",
    RankActivity.DONE: "their end",
}


def _where(ranks: Sequence[RankState]) -> str:
    first = min(ranks, key=lambda rank: (rank.step, rank.rank))
    return _PLACES.get(first.activity, f"step {first.step}")


def _numbers(ranks: Iterable[RankState]) -> tuple[int, ...]:
    return tuple(sorted({rank.rank for rank in ranks})[:EXITS_MAX])


def not_ended(ranks: Iterable[RankState]) -> frozenset[int]:
    """Return ranks that have done all of their work and do not end."""
    late_ms = 1000 * ENDS_WITHIN_S
    return frozenset(rank.rank for rank in ranks if rank.activity is RankActivity.DONE and rank.quiet_ms > late_ms)


def gave_up(
    watch: HangWatch, ranks: Sequence[RankState], now_s: float, *, devices: int, pp: int
) -> StallEvidence | None:
    """Return what a rank waited for that gave up; None if nothing sets a rank apart."""
    if watch.moved_at_s is None or now_s - watch.moved_at_s < GAVE_UP_AFTER_S:
        return None
    kind, suspects = accuse(ranks, pp=pp)
    if not suspects:
        return None
    message = describe(kind, suspects, ranks, devices=devices)[:STALL_CHARACTERS_MAX]
    step = min(rank.step for rank in ranks)
    quiet_s = now_s - watch.moved_at_s
    return StallEvidence(kind=kind, suspects=suspects, step=step, quiet_seconds=quiet_s, message=message)
