"""What the live view works out of progress records."""

from __future__ import annotations

import pytest

from polyreme.local_run.progress_view import EffectiveTime


def test_each_step_counts_at_its_own_pace_and_lost_steps_are_given_back() -> None:
    time = EffectiveTime()
    time.advance(10, 0.1)
    time.advance(20, 0.3)
    time.advance(20, 9.0)
    assert time.seconds == pytest.approx(4.0)
    time.advance(15, 0.2)
    assert time.seconds == pytest.approx(3.0)
    time.advance(25, 0.1)
    assert time.seconds == pytest.approx(4.0)


def test_a_run_that_starts_over_has_no_effective_time() -> None:
    time = EffectiveTime()
    time.advance(8, 0.5)
    time.advance(0, 0.5)
    assert time.seconds == 0.0
