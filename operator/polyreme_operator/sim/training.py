"""What ranks do, reduced to what the control plane can see or harm: steps, checkpoints, exits."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from polyreme_api.history import ResumePoint, checkpoint_name, choose_resume, committed_steps
from polyreme_api.progress import CheckpointRef, StepRecord


@dataclasses.dataclass(slots=True)
class Root:
    """A job's checkpoint root: survives everything, takes writes from whoever reaches it."""

    points: dict[int, ResumePoint] = dataclasses.field(default_factory=dict)
    committed: list[CheckpointRef] = dataclasses.field(default_factory=list)
    steps: dict[int, list[StepRecord]] = dataclasses.field(default_factory=dict)

    def fix_resume(self, attempt: int, *, now_s: float) -> ResumePoint:
        """Fix where an attempt begins, once: create-if-absent."""
        if attempt not in self.points:
            newest = choose_resume(self.committed, list(self.points.values()))
            name = None if newest is None else checkpoint_name(newest)
            self.points[attempt] = ResumePoint(attempt=attempt, resume_from=name, fixed_at_s=now_s)
        return self.points[attempt]

    def history(self) -> list[int]:
        """Steps of the committed history, in order."""
        return [record.step for record in committed_steps(list(self.points.values()), self.steps)]


@dataclasses.dataclass(eq=False, slots=True)
class Rank:
    """One rank's process."""

    attempt: int
    rank: int
    ended: Callable[[Rank, int | None, int | None], None]
    """Told once, with exit code or signal."""
    alive: bool = True
    stopped: bool = False
    """Stopped by SIGSTOP."""

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
