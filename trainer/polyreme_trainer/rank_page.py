"""This rank's page: where the trainer records what it does, for the detection of hangs and of slow ranks.

The page is one of a process, as its signal handlers are: a rank's code writes it from wherever it waits. Where no page
is attached, as in tests and offline tools, nothing is written.
"""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

from polyreme_api.errors import FencedError
from polyreme_api.rank_state import (
    ACTIVITY,
    COMPUTED_US,
    EXCHANGED_US,
    EXCHANGES,
    MICROBATCH,
    MOVED_NS,
    MOVES,
    SENT_BACKWARD,
    SENT_FORWARD,
    STAGE,
    STEP,
    UNTIL_NS,
    WAIT,
    WORK,
    ExchangeKind,
    RankActivity,
    RankWait,
)
from polyreme_system.clock import boot_s
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
    exchanged_ns: tuple[int, ...] = (0,) * len(ExchangeKind)
    """Parts of it, by ``ExchangeKind``."""
    rows = 0
    """Rows that this rank's experts got from other ranks' tokens and its own."""


_KINDS: dict[int, ExchangeKind] = {}
"""By the identity of a process group, which is never closed before its rank ends."""


def attach(descriptor: int) -> None:
    """Record on the page that the launcher reads."""
    _PAGE.attach(descriptor)


def exclude_thread() -> None:
    """Record nothing of what this thread does, such as saving beside the training."""
    _PAGE.exclude_thread()


def advance() -> None:
    """Record that the rank advances with long work that waits for no other rank, also from another thread."""
    _PAGE.moved()


def time_exchanges(group: object, kind: ExchangeKind) -> None:
    """Time the exchanges of a process group as those of a kind."""
    _KINDS[id(group)] = kind


def add_rows(rows: int) -> None:
    """Count rows that this rank's experts compute in the step."""
    _Clock.rows += rows


def rows() -> int:
    """Return how many rows this rank's experts got in the step; 0 if none came from other ranks."""
    return _Clock.rows


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
        _Clock.step_began_ns, _Clock.waited_ns, _Clock.rows = _PAGE.moved(), 0, 0
        _Clock.exchanged_ns = (0,) * len(ExchangeKind)


def check_lease() -> None:
    """Refuse to begin a step when the leader has lost the right to train (``polyreme_launcher.fence_watch``).

    Raises:
        FencedError: Saying how that came about.
    """
    until_s = _PAGE.numbers[UNTIL_NS] / 1e9
    if until_s and (over_s := boot_s() - until_s) > 0:
        raise FencedError(
            f"no step may begin: the right to train ended {over_s:.0f} s ago, since neither the checkpoint root nor "
            "the API server has confirmed that no newer attempt has begun"
        )


def leave_step(work: int) -> None:
    """Record that the update of a step is done, how long the rank computed for it, and how long exchanges took.

    Args:
        work: Operations of the step, as far as they differ between ranks of a pipeline stage.
    """
    if not _PAGE.is_ours():
        return
    numbers, now_ns = _PAGE.numbers, _PAGE.moved()
    if numbers[ACTIVITY] == RankActivity.FIRST_STEP:  # kernels and buffers were made
        numbers[COMPUTED_US] = 0
        return
    numbers[COMPUTED_US] = max(1, (now_ns - _Clock.step_began_ns - _Clock.waited_ns) // _NS_PER_US)
    numbers[WORK] = work
    for kind, exchanged_ns in enumerate(_Clock.exchanged_ns):
        numbers[EXCHANGED_US + kind] = exchanged_ns // _NS_PER_US


def enter_activity(activity: RankActivity) -> None:
    """Record what the rank is busy with from now on."""
    if _PAGE.is_ours():
        _PAGE.numbers[ACTIVITY] = activity
        _PAGE.numbers[WAIT] = RankWait.NOTHING
        _PAGE.moved()


@contextlib.contextmanager
def activity(during: RankActivity) -> Iterator[None]:
    """Record what the rank is busy with in a block within a step: its time counts as a wait, its rows not at all."""
    before = _PAGE.numbers[ACTIVITY]
    began_ns, waited_ns = _PAGE.moved() if _PAGE.is_ours() else 0, _Clock.waited_ns
    exchanged_ns, rows = _Clock.exchanged_ns, _Clock.rows
    enter_activity(during)
    try:
        yield
    finally:
        if _PAGE.is_ours():
            _PAGE.numbers[ACTIVITY] = before
            _Clock.waited_ns = waited_ns + _PAGE.moved() - began_ns
            _Clock.exchanged_ns, _Clock.rows = exchanged_ns, rows


def exchanges(function: Callable[Parameters, Result]) -> Callable[Parameters, Result]:
    """Record that a rank waits for others while a function runs that exchanges with them.

    Its argument ``group``, if it has one, says which kind of exchange it is.
    """
    names = list(inspect.signature(function).parameters)
    place = names.index("group") if "group" in names else len(names)

    @functools.wraps(function)
    def exchange(*arguments: Parameters.args, **options: Parameters.kwargs) -> Result:
        if not _PAGE.is_ours() or _PAGE.numbers[WAIT] == RankWait.EXCHANGE:
            return function(*arguments, **options)
        _PAGE.numbers[EXCHANGES] += 1
        _enter_wait(RankWait.EXCHANGE)
        # Left only after success: a rank that raises waits no longer, but it hasn't advanced either.
        result = function(*arguments, **options)
        took_ns = _leave_wait()
        group: Any = arguments[place] if place < len(arguments) else options.get("group")
        if (kind := _KINDS.get(id(group))) is not None:
            times = _Clock.exchanged_ns
            _Clock.exchanged_ns = (*times[:kind], times[kind] + took_ns, *times[kind + 1 :])
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


def _leave_wait() -> int:
    """Return how long the wait took [ns]."""
    _PAGE.numbers[WAIT] = RankWait.NOTHING
    took_ns = _PAGE.moved() - _Clock.wait_began_ns
    _Clock.waited_ns += took_ns
    return took_ns
