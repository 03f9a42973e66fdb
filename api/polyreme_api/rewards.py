"""Rewards of answers that a model has written: a border between the trainer and what runs a user's function."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol

from polyreme_api.job.objective import Objective


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Answered:
    """An answer of the model, as tokens."""

    prompt: Sequence[int]
    """With media tokens."""
    answer: Sequence[int]
    """Without the token that ends it."""
    expected: Sequence[int]
    """The answer of the data."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rewarded:
    """An answer as text, and its reward."""

    prompt: str
    answer: str
    expected: str
    reward: float
    """Finite."""


class Rewards(Protocol):
    """Rewards answers."""

    def of(self, answers: Sequence[Answered], objective: Objective) -> list[Rewarded]:
        """Return the reward of each answer, by a stage's objective.

        Raises:
            InvalidConfigError: If the function is not found.
            StepFailedError: If it fails, takes too long, or returns no finite number: naming the answer.
        """
        ...
