"""Budget of thinking: an answer that has thought for so many tokens continues with the tag that ends a thought."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThinkingBudget:
    """How long an answer may think."""

    tokens_max: int
    end: tuple[int, ...]
    """Tokens of the tag."""
    has_ended: Callable[[Sequence[int]], bool]
    """Whether some tokens hold the tag; asked once an answer, with its first ``tokens_max``."""

    def forced(self, made: Sequence[int]) -> int | None:
        """Return the token that must follow those of an answer; None: the model chooses."""
        place = len(made) - self.tokens_max
        if not 0 <= place < len(self.end) or self.has_ended(made[: self.tokens_max]):
            return None
        return self.end[place]
