"""State of all ranks as the leader knows it: the followers' newest looks, and the evidence of hangs and stragglers."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from polyreme_api.progress import EXITS_MAX, ProgressRecord
from polyreme_api.rank_state import RankState, states_of
from polyreme_launcher.protocol import hang_evidence, straggler_evidence
from polyreme_launcher.protocol.leader_events import AttemptView

FRESH_S = 8.0
"""A look counts for so long after its launcher was last heard: it beats every half second."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RankWatch:
    """The ranks of one attempt."""

    states: Mapping[int, tuple[RankState, ...]] = dataclasses.field(default_factory=dict)
    """By worker."""
    hang: hang_evidence.HangWatch = dataclasses.field(default_factory=hang_evidence.HangWatch)
    speed: straggler_evidence.SpeedWatch = dataclasses.field(default_factory=straggler_evidence.SpeedWatch)


def take(watch: RankWatch, index: int, numbers: tuple[int, ...]) -> RankWatch:
    """Take a worker's newest look at its ranks."""
    return dataclasses.replace(watch, states={**watch.states, index: states_of(numbers)})


def look(watch: RankWatch, attempt: AttemptView, heard: Mapping[int, float], now_s: float, *, ended: int) -> RankWatch:
    """Look at all ranks whose launchers were heard lately.

    Args:
        watch: What was known.
        attempt: The attempt.
        heard: When each worker's launcher was last heard.
        now_s: Steady time.
        ended: Ranks that have ended with code 0: those that still export are watched without them.
    """
    fresh = [
        state
        for index, states in sorted(watch.states.items())
        if now_s - heard.get(index, float("-inf")) <= FRESH_S
        for state in states
    ]
    world = attempt.replicas * attempt.devices
    speed = straggler_evidence.look(watch.speed, fresh, world=world, pp=attempt.pp, blocks=attempt.blocks)
    seen = hang_evidence.look(
        watch.hang,
        fresh,
        now_s,
        world=world - ended,
        limits=attempt.hang_limits,
        devices=attempt.devices,
        pp=attempt.pp,
    )
    return dataclasses.replace(watch, hang=seen, speed=speed)


def on_record(record: ProgressRecord, watch: RankWatch) -> ProgressRecord:
    """Put what is known of the ranks on a record."""
    ranks = [state for states in watch.states.values() for state in states]
    stopped = tuple(sorted(state.rank for state in ranks if state.stopped))[:EXITS_MAX]
    changes = {
        "stopped": stopped,
        "watched_ranks": sum(state.watched for state in ranks),
        "stall": watch.hang.stall,
        "stragglers": watch.speed.stragglers,
    }
    return record.model_copy(update=changes)


def after_exit(record: ProgressRecord, watch: RankWatch, attempt: AttemptView, now_s: float) -> ProgressRecord:
    """Put on a record what held up a rank that has ended by itself."""
    if record.stall is not None:
        return record
    ranks = [state for states in watch.states.values() for state in states]
    found = hang_evidence.gave_up(watch.hang, ranks, now_s, devices=attempt.devices, pp=attempt.pp)
    return record.model_copy(update={"stall": found})
