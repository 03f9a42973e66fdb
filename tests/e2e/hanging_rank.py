"""A rank that hangs or stops as it is asked, in one attempt: ``attempt:rank:step:how``, separated by commas."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from polyreme_launcher import rank
from polyreme_trainer.train import loop

VARIABLE = "POLYREME_TEST_HANGS"


def hanging(asked: str, **variables: str) -> dict[str, Any]:
    """Write a pod template in which ranks hang or stop as they are asked."""
    variables |= {
        VARIABLE: asked,
        "POLYREME_RANK_TARGET": f"{__name__}:main",
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    environment = [{"name": name, "value": value} for name, value in variables.items()]
    return {"spec": {"containers": [{"name": "worker", "env": environment}]}}


def spin() -> None:
    """Run away in Python, in no exchange."""
    while True:
        sum(range(1000))


def wait() -> None:
    """Wait for something that never comes, before the exchange that the others enter."""
    while True:
        time.sleep(1.0)


def stop() -> None:
    """Stop as a debugger stops a process; SIGCONT lets it continue."""
    os.kill(os.getpid(), signal.SIGSTOP)


HOW = {"spin": spin, "wait": wait, "stop": stop}


def main() -> int:
    """Train, and hang or stop where this rank of this attempt is asked to."""
    place = f"{os.environ['POLYREME_ATTEMPT']}:{os.environ['RANK']}"
    for asked in filter(None, os.environ.get(VARIABLE, "").split(",")):
        begin, step, how = asked.rsplit(":", 2)
        if begin == place:
            if how == "end":
                _hang_at_the_end()
            else:
                _hang(int(step), HOW[how])
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
