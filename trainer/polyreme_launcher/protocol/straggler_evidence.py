"""Evidence of stragglers: a pure function of what the launchers see of all ranks, without clock or I/O.

Each time that every rank has ended another step, a round takes two measures of each rank: its computing time, and its
computing time per operation. The lower quartile of the last rounds is compared within a pipeline stage: a burst raises
only the other rounds. A rank is slow only if both measures say so, so that uneven data name none: a sound rank with
more work than its peers takes longer in total, but never longer per operation; one with less work, the other way round.

For each kind of exchange the groups are compared too. A group's time is the minimum over its members: the last one to
arrive waits for no other member, so its time is that of the exchange alone.

Only the last rounds of one attempt are kept.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

from polyreme_api.progress import EXITS_MAX, STRAGGLERS_MAX, Straggler
from polyreme_api.rank_state import ExchangeKind, RankState

ROUNDS = 16
"""Rounds that are kept, and needed to name one."""
BURST_ROUNDS = 3
"""So many rounds may be faster than a rank's usual time: of ``ROUNDS``, that is their lower quartile."""
RANK_NAMED, RANK_RECOVERED = 1.2, 1.1
"""A rank is named at this multiple of its peers' time, and stays named down to the second."""
GROUP_NAMED, GROUP_RECOVERED = 2.0, 1.5
"""The same for a group: exchange times vary more."""
GROUP_EXCESS_MIN = 0.05
"""A group is named only if it loses at least this share of a step's computing time."""
BEFORE = 0.88
"""A rank became slow in the first round with at least this share of its usual time per operation."""

Key: TypeAlias = tuple[ExchangeKind | None, int]
"""A rank (None) or, of a kind of exchange, a group, by number."""
Measures: TypeAlias = tuple[float, float]
"""Time, and time per operation."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Round:
    """Measures of one step of all ranks."""

    step: int
    """The last step that all of them have ended."""
    measures: Mapping[Key, Measures]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SpeedWatch:
    """What is known of an attempt."""

    steps: Mapping[int, int] = dataclasses.field(default_factory=dict)
    """The step that each rank worked on at its last round."""
    rounds: tuple[Round, ...] = ()
    named: Mapping[Key, Straggler] = dataclasses.field(default_factory=dict)

    @property
    def stragglers(self) -> tuple[Straggler, ...]:
        """Those that are named, the slowest first."""
        found = sorted(self.named.values(), key=lambda each: (-each.slowdown, each.ranks))
        return tuple(found[:STRAGGLERS_MAX])


def look(
    watch: SpeedWatch, ranks: Sequence[RankState], *, world: int, pp: int, blocks: Mapping[ExchangeKind, int]
) -> SpeedWatch:
    """Take one look at all ranks.

    Args:
        watch: What was known.
        ranks: Their states, as new as they are.
        world: Ranks of the attempt.
        pp: Ranks of a pipeline.
        blocks: Ranks of a group, by kind of exchange.
    """
    measured = sorted((rank for rank in ranks if rank.watched and rank.computed_us), key=lambda rank: rank.rank)
    if len(measured) < world or any(rank.step <= watch.steps.get(rank.rank, 0) for rank in measured):
        return watch
    measures: dict[Key, Measures] = {
        (None, rank.rank): (rank.computed_us, rank.computed_us / max(1, rank.work)) for rank in measured
    }
    for kind, size in blocks.items():
        if 1 < size < world:
            for number in range(world // size):
                least = float(min(_exchanged_us(rank, kind) for rank in measured[number * size : (number + 1) * size]))
                measures[kind, number] = least, least
    newest = Round(step=min(rank.step for rank in measured) - 1, measures=measures)
    watch = dataclasses.replace(
        watch, steps={rank.rank: rank.step for rank in measured}, rounds=(*watch.rounds, newest)[-ROUNDS:]
    )
    return watch if len(watch.rounds) < ROUNDS else dataclasses.replace(watch, named=_named(watch, world // pp, blocks))


def _exchanged_us(rank: RankState, kind: ExchangeKind) -> int:
    return (rank.stage_us, rank.experts_us, rank.context_us, rank.tensor_us)[kind]


def _named(watch: SpeedWatch, stage: int, blocks: Mapping[ExchangeKind, int]) -> dict[Key, Straggler]:
    """Name those that are slow by now; one that stays named keeps its first report.

    Args:
        watch: What is known, with the newest round.
        stage: Ranks of a pipeline stage.
        blocks: Ranks of a group, by kind of exchange.
    """
    found: dict[Key, Straggler] = {}
    for key, slowdown in _slowdowns(watch.rounds, stage):
        kind, number = key
        named, recovered = (RANK_NAMED, RANK_RECOVERED) if kind is None else (GROUP_NAMED, GROUP_RECOVERED)
        known = watch.named.get(key)
        if known is not None and slowdown >= recovered:
            found[key] = known
        elif known is None and slowdown >= named:
            size = 1 if kind is None else blocks[kind]
            found[key] = Straggler(
                ranks=tuple(range(number * size, (number + 1) * size)[:EXITS_MAX]),
                group="" if kind is None else kind.name.lower(),
                since_step=_since(key, watch.rounds),
                slowdown=round(slowdown, 2),
            )
    return found


def _slowdowns(rounds: Sequence[Round], stage: int) -> Iterator[tuple[Key, float]]:
    """Yield how many times as long as its peers each took, by the measure that says less.

    Args:
        rounds: The last ones.
        stage: Ranks of a pipeline stage.
    """
    usual = {key: _usual(key, rounds) for key in rounds[-1].measures}
    noticed_us = GROUP_EXCESS_MIN * _lower_median([time for (kind, _), (time, _) in usual.items() if kind is None])
    by_peers: dict[tuple[ExchangeKind | None, int], list[Key]] = {}
    for kind, number in usual:
        by_peers.setdefault((kind, number // stage if kind is None else 0), []).append((kind, number))
    for (kind, _), keys in by_peers.items():
        time_us, rate = (_lower_median([usual[key][place] for key in keys]) for place in range(2))
        for key in keys:
            if kind is None or usual[key][0] - time_us >= noticed_us:
                yield key, min(usual[key][0] / max(1.0, time_us), usual[key][1] / rate if rate else 1.0)


def _usual(key: Key, rounds: Sequence[Round]) -> Measures:
    times, rates = zip(*(each.measures[key] for each in rounds), strict=True)
    return sorted(times)[BURST_ROUNDS], sorted(rates)[BURST_ROUNDS]


def _since(key: Key, rounds: Sequence[Round]) -> int:
    _, usual = _usual(key, rounds)
    return next(each.step for each in rounds if each.measures[key][1] >= BEFORE * usual)


def _lower_median(values: Sequence[float]) -> float:
    """Of an even count the smaller one, so that one of two is slow, and half of the ranks may be."""
    return sorted(values)[(len(values) - 1) // 2]
