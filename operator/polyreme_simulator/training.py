"""Simulated ranks, reduced to what the control plane can see or harm: steps, checkpoints, exits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from polyreme_api.history import ResumePoint, attempt_spans, committed_steps, is_history
from polyreme_api.progress import CheckpointRef, StepRecord


@dataclasses.dataclass(slots=True)
class Root:
    """A job's checkpoint root: survives everything, takes writes from every process that reaches it."""

    claims: set[int] = dataclasses.field(default_factory=set)
    points: dict[int, ResumePoint] = dataclasses.field(default_factory=dict)
    committed: list[CheckpointRef] = dataclasses.field(default_factory=list)
    steps: dict[int, list[StepRecord]] = dataclasses.field(default_factory=dict)

    def claim(self, attempt: int) -> None:
        """Create the attempt's claim."""
        self.claims.add(attempt)

    def look(self) -> tuple[list[ResumePoint], list[CheckpointRef]]:
        """Return the points that are fixed, and what is committed."""
        return list(self.points.values()), list(self.committed)

    def put_if_absent(self, point: ResumePoint) -> ResumePoint:
        """Create the resume point of its attempt if there is none, and return the one that is there then."""
        return self.points.setdefault(point.attempt, point)

    def commit(self, reference: CheckpointRef) -> None:
        """Take a marker, and let the writer delete what is older, unless a later attempt has claimed the root."""
        if reference not in self.committed:
            self.committed.append(reference)
        if max(self.claims, default=0) > reference.attempt:
            return
        spans = attempt_spans(self.points.values())
        self.committed = [
            other for other in self.committed if other.step >= reference.step or not is_history(other, spans)
        ]

    def history(self) -> list[int]:
        """Steps of the committed history, in order."""
        return [record.step for record in committed_steps(list(self.points.values()), self.steps)]


@dataclasses.dataclass(eq=False, slots=True)
class Rank:
    """One rank's process."""

    attempt: int
    rank: int
    ended: Callable[[Rank, int | None, int | None], None]
    """Called once, with exit code or signal."""
    alive: bool = True
    stopped: bool = False
    """Stopped by SIGSTOP."""
    was_stopped: bool = False

    def stop(self) -> None:
        """SIGSTOP."""
        self.stopped = self.was_stopped = True

    def end(self, *, code: int | None = None, signal: int | None = None) -> None:
        """End the process."""
        if self.alive:
            self.alive = False
            self.ended(self, code, signal)


@dataclasses.dataclass(slots=True)
class Gang:
    """The ranks of one attempt of one job, which step together or not at all."""

    attempt: int
    world: int
    resumed_from: int
    ranks: dict[int, Rank] = dataclasses.field(default_factory=dict)
    step: int = 0
    durable: CheckpointRef | None = None
    busy_until_s: float = 0.0
    """Until when its ranks are busy with something else than steps."""
    done: bool = False
    """Rank 0 has said its last word."""

    @property
    def whole(self) -> bool:
        """Whether every rank is there and runs."""
        return len(self.ranks) == self.world and all(rank.alive and not rank.stopped for rank in self.ranks.values())

    @property
    def live(self) -> bool:
        """Whether any rank lives, stopped or not."""
        return any(rank.alive for rank in self.ranks.values())
