"""A rank of a real gang that computes more slowly than the others is named from the pages that ranks write."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.rank_state import RankActivity
from polyreme_launcher.protocol.straggler_evidence import SpeedWatch, look
from polyreme_launcher.rank_pages import RankPages
from tests.parallel.attempts import until

SLOW = 1
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_a_rank_that_takes_one_and_a_half_times_as_long_is_named(start: Any, tmp_path: Path) -> None:
    pages, watch = RankPages(), SpeedWatch()
    with contextlib.ExitStack() as stack:
        opened = [stack.enter_context(pages.open(rank, time.monotonic_ns())) for rank in range(2)]
        paths = [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in opened]
        gang = start(
            "train",
            layout=(2, 1),
            root=tmp_path,
            steps=2000,
            interval=2000,
            pages=paths,
            slow_rank=SLOW,
            decoder={"layers": 4},
        )
        stack.callback(gang.kill)

        def named() -> bool:
            nonlocal watch
            states = list(pages.read(time.monotonic_ns()).values())
            watch = look(watch, states, world=2, pp=1, blocks={})
            assert any(process.is_alive() for process in gang.processes), gang.logs()
            return bool(watch.stragglers)

        until(named, "a straggler is named")
        states = pages.read(time.monotonic_ns())
    pages.close()
    (found,) = watch.stragglers
    assert (found.ranks, found.group) == ((SLOW,), "")
    assert 1.2 <= found.slowdown <= 2.5
    assert {state.activity for state in states.values()} <= {RankActivity.STEP, RankActivity.DATA_WAIT}
    assert all(state.work and state.stage_us for state in states.values())
