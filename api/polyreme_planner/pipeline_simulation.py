"""Simulation of a pipeline's schedule: how long it takes, and what each rank holds meanwhile, stage by stage.

A slot begins when its rank is free and its inputs have come; its results leave when the whole slot is done, as torch's
runtime sends them. A rank that computes does not wait for what it sends.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from polyreme_api.errors import PolyremeError
from polyreme_planner.schedules import Kind, Schedule, Slot, Table, Work, pieces, table


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StageTimes:
    """Time of each kind of work on one stage, for one microbatch [seconds]."""

    forward_s: float
    input_s: float
    """Gradient of the inputs, recomputation included."""
    weight_s: float
    """Gradient of the weights."""

    @property
    def total_s(self) -> float:
        """All work on one microbatch."""
        return self.forward_s + self.input_s + self.weight_s

    def of(self, kind: Kind) -> float:
        """Time of one piece of work."""
        if kind is Kind.FORWARD:
            return self.forward_s
        if kind is Kind.BACKWARD:
            return self.input_s + self.weight_s
        return self.input_s if kind is Kind.INPUT else self.weight_s


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """A slot in time."""

    slot: Slot
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """Result of a simulation."""

    makespan_s: float
    busy_s: tuple[float, ...]
    """Time that each rank computes."""
    spans: tuple[tuple[Span, ...], ...]
    """Spans of each rank."""

    @property
    def bubble(self) -> float:
        """Share of the ranks' time in which they wait, 0 to 1."""
        return 1 - sum(self.busy_s) / (len(self.busy_s) * self.makespan_s) if self.makespan_s > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Step:
    """One slot in an order in which all its inputs come before it."""

    rank: int
    slot: Slot
    keys: tuple[int, ...]
    """Index of the time of each of its pieces: stage x kinds + kind."""
    needs: tuple[tuple[int, bool], ...]
    """Steps whose results it needs, and whether these come from another rank."""


_KINDS = tuple(Kind)
_KIND_AT = {kind: at for at, kind in enumerate(_KINDS)}


@dataclasses.dataclass(frozen=True, slots=True)
class Program:
    """A schedule in one order, which does not depend on times: simulated as often as there are times to try."""

    ranks: int
    steps: tuple[_Step, ...]

    @classmethod
    def of(cls, table: Table) -> Program:
        """Order a table.

        Raises:
            PolyremeError: If the table waits for itself.
        """
        last = max((work.stage for slots in table for work in pieces(slots)), default=0)
        at = [0] * len(table)
        steps: list[_Step] = []
        made: dict[tuple[bool, int, int], int] = {}
        left = sum(map(len, table))
        while len(steps) < left:  # every round except the last brings a step forward
            before = len(steps)
            for rank, slots in enumerate(table):
                while at[rank] < len(slots):
                    slot = slots[at[rank]]
                    sources = [_source(work, last) for work in slot]
                    if any(source is not None and source not in made for source in sources):
                        break
                    needs = tuple(made[source] for source in sources if source is not None)
                    keys = tuple(work.stage * len(_KINDS) + _KIND_AT[work.kind] for work in slot)
                    for work in slot:
                        if work.kind is not Kind.WEIGHT:
                            made[work.kind is Kind.FORWARD, work.stage, work.microbatch] = len(steps)
                    steps.append(_Step(rank, slot, keys, tuple((need, steps[need].rank != rank) for need in needs)))
                    at[rank] += 1
            if len(steps) == before:
                next_ = [str(slots[place][0]) for slots, place in zip(table, at, strict=True) if place < len(slots)]
                raise PolyremeError(f"schedule deadlocks: next are {', '.join(next_)}")
        return cls(len(table), tuple(steps))

    def makespan_s(self, times: Sequence[StageTimes], *, transfer_s: float = 0.0) -> float:
        """Simulate it and return only the time [seconds]."""
        _, free_s = self._run(times, transfer_s)
        return max(free_s, default=0.0)

    def _run(self, times: Sequence[StageTimes], transfer_s: float) -> tuple[list[float], list[float]]:
        duration_s = [of.of(kind) for of in times for kind in _KINDS]
        end_s: list[float] = []
        free_s = [0.0] * self.ranks
        for step in self.steps:
            at_s = free_s[step.rank]
            for need, crosses in step.needs:
                come_s = end_s[need] + transfer_s if crosses else end_s[need]
                at_s = max(at_s, come_s)
            for key in step.keys:
                at_s += duration_s[key]
            end_s.append(at_s)
            free_s[step.rank] = at_s
        return end_s, free_s

    def simulate(self, times: Sequence[StageTimes], *, transfer_s: float = 0.0) -> Simulated:
        """Simulate it.

        Args:
            times: Of each stage, in order.
            transfer_s: From the end of a slot until another rank has its result; nothing between stages of one rank.
        """
        end_s, free_s = self._run(times, transfer_s)
        spans: list[list[Span]] = [[] for _ in range(self.ranks)]
        for step, done_s in zip(self.steps, end_s, strict=True):
            took_s = sum(times[work.stage].of(work.kind) for work in step.slot)
            spans[step.rank].append(Span(step.slot, done_s - took_s, done_s))
        return Simulated(
            makespan_s=max(free_s, default=0.0),
            busy_s=tuple(sum(span.end_s - span.begin_s for span in of) for of in spans),
            spans=tuple(map(tuple, spans)),
        )


def _source(work: Work, last: int) -> tuple[bool, int, int] | None:
    """Name the work of another stage that this work waits for; its own stage's work comes before it on the rank."""
    forward = work.kind is Kind.FORWARD
    if work.kind is Kind.WEIGHT or work.stage == (0 if forward else last):
        return None
    return forward, work.stage - 1 if forward else work.stage + 1, work.microbatch


@functools.lru_cache(maxsize=256)
def program(schedule: Schedule, *, ranks: int, microbatches: int, chunks: int | None = None) -> Program:
    """Order the table of a schedule.

    Raises:
        InvalidConfigError: If the schedule can't run so many microbatches over so many ranks.
    """
    return Program.of(table(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks))


Held = tuple[tuple[int, ...], ...]
"""Microbatches that a rank holds at a time, of each of its stages in rising order: those that no other exceeds."""


@functools.lru_cache(maxsize=256)
def held_at_most(schedule: Schedule, *, ranks: int, microbatches: int, chunks: int | None = None) -> tuple[Held, ...]:
    """Return what each rank holds of its microbatches' activations at its fullest, in microbatches of each stage.

    A microbatch is held from its forward until the gradient of the weights is made. Which of the moments is the fullest
    depends on the sizes of the stages, so all that may be are kept.

    Raises:
        InvalidConfigError: If the schedule can't run so many microbatches over so many ranks.
    """
    rows = table(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks)
    return tuple(_fullest(slots) for slots in rows)


def _fullest(slots: Sequence[Slot]) -> Held:
    held = dict.fromkeys(sorted({work.stage for work in pieces(slots)}), 0)
    moments: set[tuple[int, ...]] = set()
    for work in pieces(slots):
        if work.kind is Kind.FORWARD:
            held[work.stage] += 1
            moments.add(tuple(held.values()))
        elif work.kind is not Kind.INPUT:
            held[work.stage] -= 1
    return tuple(
        sorted(
            moment
            for moment in moments
            if not any(
                other != moment and all(more >= count for more, count in zip(other, moment, strict=True))
                for other in moments
            )
        )
    )
