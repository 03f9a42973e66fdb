"""A real rank that forgets a send, or stays away from an exchange, holds up the others: their pages name it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.progress import StallKind
from polyreme_api.rank_state import RankState
from polyreme_launcher.protocol.hang_evidence import accuse
from tests.parallel.attempts import until
from tests.parallel.paged_ranks import paged
from tests.parallel.pipes import Pipe

STILL_MS = 1500
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


@pytest.mark.parametrize(
    "degrees",
    [{"pp": 2, "dp": 2, "ep": 2}, pytest.param({"pp": 2, "dp": 4, "ep": 2}, marks=pytest.mark.soak)],
    ids=str,
)
def test_a_rank_that_skips_a_send_is_named(start: Any, tmp_path: Path, degrees: dict[str, int]) -> None:
    pipe, states = Pipe(degrees, "1F1B", (5, 3)), list[RankState]()
    with paged(start, tmp_path, degrees, skips_send=1, **pipe.request) as ranks:

        def still() -> bool:
            states[:] = ranks.look()
            return all(state.step == 2 and state.quiet_ms > STILL_MS for state in states)

        until(still, "no rank advances")
    assert accuse(states, pp=2) == (StallKind.NOT_SENT, (1,)), states


def test_a_rank_that_stays_away_from_an_exchange_of_fsdp2_is_named(start: Any, tmp_path: Path) -> None:
    states = list[RankState]()
    request = {"parameter_sharding": "FSDP2", "stays_away": 1}
    with paged(start, tmp_path, {"dp": 2}, **request) as ranks:

        def still() -> bool:
            states[:] = ranks.look()
            return all(state.step == 2 and state.quiet_ms > STILL_MS for state in states)

        until(still, "no rank advances")
    assert accuse(states, pp=1) == (StallKind.OUTSIDE, (1,)), states
