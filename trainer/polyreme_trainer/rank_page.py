"""This rank's page: where the trainer records what it does, for the detection of hangs and of slow ranks.

The page is one of a process, as its signal handlers are: a rank's code writes it from wherever it waits. Where no page
is attached, as in tests and offline tools, nothing is written.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import ParamSpec, TypeVar

from polyreme_api.rank_state import (
    ACTIVITY,
    COMPUTED_US,
    EXCHANGES,
    MICROBATCH,
    MOVED_NS,
    MOVES,
    SENT_BACKWARD,
    SENT_FORWARD,
    STAGE,
    STEP,
    WAIT,
    RankActivity,
    RankWait,
)
from polyreme_system.rank_page import PageWriter

_PAGE = PageWriter(moves=MOVES, moved_ns=MOVED_NS)
_NS_PER_US = 1000

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


class _Clock:
    """Time of the step so far that was spent in waits."""

    step_began_ns = 0
    waited_ns = 0
    wait_began_ns = 0


def attach(descriptor: int) -> None:
    """Record on the page that the launcher reads."""
    _PAGE.attach(descriptor)


def exclude_thread() -> None:
    """Record nothing of what this thread does, such as saving beside the training."""
    _PAGE.exclude_thread()


def advance() -> None:
    """Record that the rank advances with long work that waits for no other rank, also from another thread."""
    _PAGE.moved()


def enter_step(number: int, *, first: bool) -> None:
    """Record that a step begins.

    Args:
        number: The step.
        first: Whether it is the first of an attempt or of a curriculum stage.
    """
    if _PAGE.is_ours():
        numbers = _PAGE.numbers
        numbers[STEP] = number
        numbers[ACTIVITY] = RankActivity.FIRST_STEP if first else RankActivity.STEP
        numbers[WAIT] = numbers[SENT_FORWARD] = numbers[SENT_BACKWARD] = 0
        _Clock.step_began_ns, _Clock.waited_ns = _PAGE.moved(), 0


def leave_step() -> None:
    """Record that the update of a step is done, and how long the rank computed for it."""
    if _PAGE.is_ours():
        took_ns = _PAGE.moved() - _Clock.step_began_ns - _Clock.waited_ns
        _PAGE.numbers[COMPUTED_US] = max(1, took_ns // _NS_PER_US)


def enter_activity(activity: RankActivity) -> None:
    """Record what the rank is busy with from now on."""
    if _PAGE.is_ours():
        _PAGE.numbers[ACTIVITY] = activity
        _PAGE.numbers[WAIT] = RankWait.NOTHING
        _PAGE.moved()


@contextlib.contextmanager
def activity(during: RankActivity) -> Iterator[None]:
    """Record what the rank is busy with in a block within a step, whose time counts as a wait."""
    before = _PAGE.numbers[ACTIVITY]
    began_ns, waited_ns = _PAGE.moved() if _PAGE.is_ours() else 0, _Clock.waited_ns
    enter_activity(during)
    try:
        yield
    finally:
        if _PAGE.is_ours():
            _PAGE.numbers[ACTIVITY] = before
            _Clock.waited_ns = waited_ns + _PAGE.moved() - began_ns


def exchanges(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Record that a rank waits for others while a function runs that exchanges with them."""

    @functools.wraps(function)
    def exchange(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not _PAGE.is_ours() or _PAGE.numbers[WAIT] == RankWait.EXCHANGE:
            return function(*arguments, **options)
        _PAGE.numbers[EXCHANGES] += 1
        _enter_wait(RankWait.EXCHANGE)
        # Left only after success: a rank that raises waits no longer, but it hasn't advanced either.
        result = function(*arguments, **options)
        _leave_wait()
        return result

    return exchange


def wait_for_stage(wait: RankWait, stage: int, microbatch: int) -> None:
    """Record that the rank waits for another stage, until it enters a stage or sends."""
    if _PAGE.is_ours():
        _PAGE.numbers[STAGE], _PAGE.numbers[MICROBATCH] = stage, microbatch
        _enter_wait(wait)


def enter_stage(stage: int, microbatch: int) -> None:
    """Record that the rank computes a stage of a microbatch, forward or backward."""
    if _PAGE.is_ours():
        if _PAGE.numbers[WAIT]:
            _leave_wait()
        _PAGE.numbers[STAGE], _PAGE.numbers[MICROBATCH] = stage, microbatch
        _PAGE.moved()


def sent(direction: RankWait) -> None:
    """Record that the rank sends what a stage has computed."""
    if _PAGE.is_ours():
        _PAGE.numbers[SENT_FORWARD if direction is RankWait.FORWARD else SENT_BACKWARD] += 1
        _PAGE.moved()


def leave_stages() -> None:
    """Record that the rank has ended its work in the pipeline of a step."""
    if _PAGE.is_ours() and _PAGE.numbers[WAIT]:
        _leave_wait()


def _enter_wait(wait: RankWait) -> None:
    if not _PAGE.numbers[WAIT]:
        _Clock.wait_began_ns = _PAGE.moved()
    else:
        _PAGE.moved()
    _PAGE.numbers[WAIT] = wait


def _leave_wait() -> None:
    _PAGE.numbers[WAIT] = RankWait.NOTHING
    _Clock.waited_ns += _PAGE.moved() - _Clock.wait_began_ns
