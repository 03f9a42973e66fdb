"""Two contenders never lead at once, whatever their clocks and the API do; and when the API recovers, one leads."""

import asyncio

from hypothesis import example, given, settings
from hypothesis import strategies as st

from polyreme_cluster.election import DEADLINE_RATIO, LEASE_S, RENEW_S
from tests.unit.cluster.election_scenes import Contest, Weather, in_virtual_time

RATE_MIN, RATE_MAX = 0.82, 1.22
"""Clocks; one runs at most 1.49 times as fast as another: the deadline allows for 1.5."""
STORM_S = 400.0


@settings(max_examples=150)
# A Lease whose last moment is shorter than what moves the clock on.
@example(
    seed=33075062,
    rates=(1.0, 1.125, 1.0),
    offsets_s=(0.0, -5.0, 0.0),
    faults=(0.0, 0.5, 0.0),
    slows=(0.0, 0.0, 0.5),
    outages=[(0, 0.0)],
)
@given(
    seed=st.integers(0, 2**32),
    rates=st.tuples(*[st.floats(RATE_MIN, RATE_MAX)] * 3),
    offsets_s=st.tuples(*[st.floats(-1e5, 1e5)] * 3),
    faults=st.tuples(*[st.sampled_from((0.0, 0.1, 0.5, 0.9))] * 3),
    slows=st.tuples(*[st.sampled_from((0.0, 0.1, 0.5))] * 3),
    outages=st.lists(st.tuples(st.integers(0, 2), st.floats(0.0, 60.0)), max_size=8),
)
def test_never_two_lead_and_one_does_in_the_end(
    seed: int,
    rates: tuple[float, ...],
    offsets_s: tuple[float, ...],
    faults: tuple[float, ...],
    slows: tuple[float, ...],
    outages: list[tuple[int, float]],
) -> None:
    assert RATE_MAX / RATE_MIN < 1 / DEADLINE_RATIO

    async def story(contest: Contest) -> None:
        weathers = [Weather(fault=fault, slow=slow) for fault, slow in zip(faults, slows, strict=True)]
        tasks = [
            contest.replica(name, weather=weather, rate=rate, offset_s=offset_s, seed=seed)
            for name, weather, rate, offset_s in zip("abc", weathers, rates, offsets_s, strict=True)
        ]
        for who, length_s in outages:
            weathers[who].down = True
            await asyncio.sleep(length_s)
            weathers[who].down = False
            await asyncio.sleep(STORM_S / 8)
        for weather in weathers:
            weather.fault = weather.slow = 0.0
        # What was sent late lands, what is held runs out, and the next one has it.
        await asyncio.sleep(50.0 + (LEASE_S + 3 * RENEW_S) / RATE_MIN)
        assert contest.together == []
        assert len(contest.leading) == 1
        (leader,) = contest.leading
        tasks["abc".index(leader)].cancel()
        await asyncio.sleep(4 * RENEW_S / RATE_MIN)
        assert len(contest.leading) == 1
        assert contest.leading != [leader]
        assert contest.together == []

    in_virtual_time(story)
