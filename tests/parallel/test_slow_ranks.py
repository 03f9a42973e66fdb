"""A rank of a real gang that computes more slowly than the others is named from the pages that ranks write."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.rank_state import RankActivity
from polyreme_launcher.protocol.straggler_evidence import SpeedWatch, look
from tests.parallel.attempts import until
from tests.parallel.paged_ranks import paged

SLOW = 1
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_a_rank_that_takes_one_and_a_half_times_as_long_is_named(start: Any, tmp_path: Path) -> None:
    watch = SpeedWatch()
    with paged(start, tmp_path, {"dp": 2}, slow_rank=SLOW, decoder={"layers": 4}) as ranks:

        def named() -> bool:
            nonlocal watch
            watch = look(watch, ranks.look(), world=2, pp=1, blocks={})
            return bool(watch.stragglers)

        until(named, "a straggler is named")
        states = ranks.look()
    (found,) = watch.stragglers
    assert (found.ranks, found.group) == ((SLOW,), "")
    assert 1.2 <= found.slowdown <= 2.5
    assert {state.activity for state in states} <= {RankActivity.STEP, RankActivity.DATA_WAIT}
    assert all(state.work and state.stage_us for state in states)
