"""How soon a part of an open page is refreshed."""

from __future__ import annotations

import pytest

from polyreme.console.live import rest_after


@pytest.mark.parametrize(
    ("took_s", "rest_s"), [(0.0, 1.0), (0.2, 1.0), (2.0, 8.0), (1000.0, 60.0)], ids=["at once", "fast", "slow", "bound"]
)
def test_a_part_that_took_long_rests_in_proportion_up_to_a_bound(took_s: float, rest_s: float) -> None:
    assert rest_after(took_s, poll_s=1.0) == rest_s
