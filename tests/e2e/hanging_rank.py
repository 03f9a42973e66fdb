"""A rank that hangs as it is asked, in one attempt: ``attempt:rank:step:how`` in a variable, separated by commas."""

from __future__ import annotations

import os
import time
from typing import Any

from polyreme_launcher import rank
from polyreme_trainer.train import loop

VARIABLE = "POLYREME_TEST_HANGS"


def spin() -> None:
    """Run away in Python, in no exchange."""
    while True:
        sum(range(1000))


def wait() -> None:
    """Wait for something that never comes, before the exchange that the others enter."""
    while True:
        time.sleep(1.0)


def main() -> int:
    """Train, and hang where this rank of this attempt is asked to."""
    place = f"{os.environ['POLYREME_ATTEMPT']}:{os.environ['RANK']}"
    for asked in filter(None, os.environ.get(VARIABLE, "").split(",")):
        begin, step, how = asked.rsplit(":", 2)
        if begin == place:
            if how == "end":
                _hang_at_the_end()
            else:
                _hang(int(step), spin if how == "spin" else wait)
    return rank.main()


def _hang(step: int, how: Any) -> None:
    backward = vars(loop)["backward"]

    def until_the_step(state: Any, *arguments: Any, **options: Any) -> Any:
        if state.step + 1 == step:
            how()
        return backward(state, *arguments, **options)

    vars(loop)["backward"] = until_the_step


def _hang_at_the_end() -> None:
    """Leave the run, then never end."""
    train = vars(rank)["train_rank"]

    def and_wait(*arguments: Any, **options: Any) -> Any:
        train(*arguments, **options)
        wait()

    vars(rank)["train_rank"] = and_wait
