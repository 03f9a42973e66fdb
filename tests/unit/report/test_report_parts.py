"""Scales, ticks, spans and words of the report."""

from __future__ import annotations

import dataclasses
import itertools
import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from polyreme.report import svg
from polyreme.report.charts import loss_chart, smoothed, smoothing_half_width, throughput_chart
from polyreme.report.data import AttemptRow, MixtureWeights
from polyreme.report.timeline import FINISHING, LOST, STARTING, TRAINING, attempt_spans
from polyreme.views.formatting import clock, duration, share, size
from tests.unit.report.samples import START_S, record, two_kills

values = st.floats(min_value=1e-6, max_value=1e9)


@given(low=values, ratio=st.floats(min_value=1.001, max_value=1e9), most=st.integers(2, 12))
def test_ticks_are_few_rising_and_inside(low: float, ratio: float, most: int) -> None:
    high = low * ratio
    for ticks in (svg.linear_ticks(low, high, most), svg.log_ticks(low, high, most)):
        assert len(ticks) <= max(most, 3)
        assert ticks == sorted(set(ticks))
        slack = 1e-6 * (high - low)
        assert all(low - slack <= tick <= high + slack for tick in ticks)


@given(value=values, low=values, high=values, logarithmic=st.booleans())
def test_a_scale_never_leaves_its_picture(value: float, low: float, high: float, logarithmic: bool) -> None:
    low, high = min(low, high), max(low, high)
    scale = svg.Scale(low=low, high=high, from_px=10, to_px=110, logarithmic=logarithmic)
    assert 10 - 1e-6 <= scale(value) <= 110 + 1e-6


def test_a_log_scale_spaces_decades_evenly() -> None:
    scale = svg.Scale(low=0.01, high=1, from_px=0, to_px=100, logarithmic=True)
    assert scale(0.1) == pytest.approx(50)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=400), st.integers(10, 50))
def test_thinning_keeps_the_extremes_and_the_order(heights: list[float], most: int) -> None:
    points = [(float(at), height) for at, height in enumerate(heights)]
    kept = svg.thin(points, most)
    assert len(kept) <= max(most, 2)
    assert kept == sorted(kept)
    assert {min(heights), max(heights)} <= {height for _, height in kept}


@given(st.text())
def test_safe_text_holds_no_markup(text: str) -> None:
    assert not set("<>\"'") & set(svg.safe(text))


def test_an_attempt_that_was_killed_lost_what_followed_its_last_kept_step() -> None:
    attempt = AttemptRow(number=1, scope="Start", started_s=START_S, ended_s=START_S + 10, cause="RankKilled")
    kept = [record(1, step, at_s=2 + step, loss=1.0) for step in (1, 2, 3)]
    lost = [record(1, step, at_s=2 + step, loss=1.0) for step in (4, 5)]
    spans = attempt_spans(attempt, committed=kept, thrown_away=lost, now_s=START_S + 99)
    assert [(span.kind, round(span.seconds, 2)) for span in spans] == [(STARTING, 2.92), (TRAINING, 2.08), (LOST, 5.0)]


def test_an_attempt_whose_every_step_was_thrown_away_lost_them_all() -> None:
    attempt = AttemptRow(number=1, scope="Start", started_s=START_S, ended_s=START_S + 10, cause="RankKilled")
    spans = attempt_spans(attempt, committed=[], thrown_away=[record(1, 1, at_s=3, loss=1.0)], now_s=START_S)
    assert [span.kind for span in spans] == [STARTING, LOST]


def test_after_the_last_step_a_run_that_succeeded_was_finishing() -> None:
    attempt = AttemptRow(number=1, scope="Start", started_s=START_S, ended_s=START_S + 10, succeeded=True)
    spans = attempt_spans(attempt, committed=[record(1, 1, at_s=3, loss=1.0)], thrown_away=[], now_s=START_S)
    assert [span.kind for span in spans] == [STARTING, TRAINING, FINISHING]


def test_an_attempt_that_runs_is_training_until_now() -> None:
    attempt = AttemptRow(number=1, scope="Start", started_s=START_S)
    spans = attempt_spans(attempt, committed=[record(1, 1, at_s=3, loss=1.0)], thrown_away=[], now_s=START_S + 20)
    assert spans[-1].kind == TRAINING
    assert spans[-1].until_s == START_S + 20


@given(
    ended=st.none() | st.floats(0, 100),
    kept=st.lists(st.floats(-50, 200), max_size=5),
    lost=st.lists(st.floats(-50, 200), max_size=5),
)
def test_spans_follow_one_another_without_gap_whatever_the_clocks_say(
    ended: float | None, kept: list[float], lost: list[float]
) -> None:
    attempt = AttemptRow(
        number=1, scope="Start", started_s=START_S, ended_s=None if ended is None else START_S + ended, cause="x"
    )
    committed = [record(1, step + 1, at_s=at, loss=1.0) for step, at in enumerate(kept)]
    thrown_away = [record(1, step + 9, at_s=at, loss=1.0) for step, at in enumerate(lost)]
    spans = attempt_spans(attempt, committed=committed, thrown_away=thrown_away, now_s=START_S + 50)
    end_s = START_S + (50 if ended is None else ended)
    assert all(span.seconds > 0 for span in spans)
    assert sum(span.seconds for span in spans) == pytest.approx(end_s - START_S, abs=1e-3)
    assert all(a.until_s == b.from_s for a, b in itertools.pairwise(spans))


def test_throughput_shows_the_pauses() -> None:
    picture = throughput_chart(two_kills())
    assert 'class="rate"' in picture
    assert 'class="rate-lost"' in picture


@pytest.mark.parametrize("steps", [12, 59, 600, 5000])
def test_the_smoothed_line_starts_and_ends_at_the_loss_and_does_not_lag(steps: int) -> None:
    falling = [record(1, step, at_s=step, loss=8.0 - 7.0 * step / steps) for step in range(1, steps + 1)]
    line = smoothed(falling)
    assert [line[row.step] for row in falling] == pytest.approx([row.loss for row in falling])
    assert (smoothing_half_width(steps) > 0) is (steps >= 60)


def test_the_smoothed_line_does_not_rise_before_the_mixture_changes() -> None:
    jump = [record(1, step, at_s=step, loss=1.0 if step < 300 else 3.0) for step in range(1, 601)]
    line = smoothed(jump, {300})
    assert [line[299], line[300]] == pytest.approx([1.0, 3.0])


def test_labels_never_cover_each_other_nor_leave_the_picture() -> None:
    data = two_kills()
    weights = {"first-source": 1, "second-source": 1, "third-source": 2}
    crowd = dataclasses.replace(
        data, mixture=[MixtureWeights(step=step, weights=weights) for step in (1, 2, 3, 40, 60, 500, 780, 799, 800)]
    )
    found = re.findall(r'<text class="mark" x="([0-9.]+)" y="([0-9.]+)"[^>]*>([^<]*)<', loss_chart(crowd))
    boxes = [(float(x), float(x) + len(text) * svg.LABEL_CHARACTER_PX, float(y)) for x, y, text in found]
    assert len(boxes) >= 6
    for one, other in itertools.combinations(boxes, 2):
        assert one[2] != other[2] or one[1] <= other[0] or other[1] <= one[0]
    assert all(left >= 0 and right <= svg.WIDTH for left, right, _ in boxes)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (None, "-"), (0, "0 s"), (0.416, "0.42 s"), (3.44, "3.4 s"), (59.4, "59 s"), (86, "1 min 26 s"),
        (3600, "1 h 00 min"), (8100, "2 h 15 min"), (90_000, "1 d 01 h"),
    ],
)  # fmt: skip
def test_durations_in_words(seconds: float | None, words: str) -> None:
    assert duration(seconds) == words


@pytest.mark.parametrize(
    ("ratio", "words"),
    [(None, "-"), (1.0, "100 %"), (0.9999, "99.9 %"), (0.5, "50 %"), (0.913, "91.3 %"), (0.0, "0 %")],
)
def test_shares_never_say_all_for_less(ratio: float | None, words: str) -> None:
    assert share(ratio) == words


def test_sizes_and_clocks() -> None:
    assert (size(512), size(12_400_000), size(3 * 2**40)) == ("512 B", "11.8 MiB", "3.0 TiB")
    assert (clock(0), clock(75), clock(3725)) == ("0:00", "1:15", "1:02:05")


@pytest.mark.parametrize(
    ("value", "words"), [(0, "0"), (0.02, "0.02"), (800, "800"), (7950, "7,950"), (1.25e4, "12.5k"), (3.2e6, "3.2M")]
)
def test_numbers_fit_an_axis(value: float, words: str) -> None:
    assert svg.short_number(value) == words


def test_a_loss_that_is_no_number_is_marked_however_late_it_comes() -> None:
    steps = [record(1, step, at_s=step, loss=1.0 if step != 3501 else math.nan) for step in range(1, 4001)]
    assert "step 3501: loss nan" in loss_chart(dataclasses.replace(two_kills(), steps=steps))
