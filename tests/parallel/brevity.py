"""Rewards of made-up answers: short ones that repeat a digit of the expected answer."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from polyreme_api.errors import StepFailedError
from polyreme_api.job.objective import Objective
from polyreme_api.rewards import Answered, Rewarded


class Brevity:
    """A pure function of an answer; with the argument ``needs`` it fails while that file is not there."""

    def of(self, answers: Sequence[Answered], objective: Objective) -> list[Rewarded]:
        if not Path(needed := objective.reward_arguments.get("needs", "/")).exists():
            raise StepFailedError(f"reward of the answer '7' failed: no file {needed}", field="reward")
        return [
            Rewarded(
                prompt=str(one.prompt),
                answer=str(one.answer),
                expected=str(one.expected),
                reward=len({*one.answer} & {*one.expected}) - 0.1 * len(one.answer),
            )
            for one in answers
        ]
