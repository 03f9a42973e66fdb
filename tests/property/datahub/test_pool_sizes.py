"""Sizes of worker pools: within their limits, enough for the backlog, never flapping, none for no work."""

import itertools
import math

from hypothesis import given
from hypothesis import strategies as st

from polyreme_datahub.registry.backlog import Backlog
from polyreme_datahub.runner.pool_sizes import (
    WINDOW_S,
    ItemTimes,
    PoolLimits,
    PoolState,
    pool_sizes,
    resized,
    workers_wanted,
)

EVERY_S = 5.0


def due(items: int, operation: str = "compose", *, device: str = "cpu", leased: int = 0) -> Backlog:
    return Backlog(operation=operation, device=device, items=items, records=items * 64, leased=leased)


LIMITS = st.builds(
    lambda least, more, threads, drain_s, cooldown_s: PoolLimits(
        least=least, most=max(1, least + more), threads=threads, drain_s=drain_s, cooldown_s=cooldown_s
    ),
    st.integers(0, 3),
    st.integers(0, 20),
    st.integers(1, 8),
    st.floats(1, 600),
    st.floats(0, 120),
)
ITEMS = st.integers(0, 100_000)
ITEM_S = st.floats(0.001, 1_000)


@given(ITEMS, ITEMS, ITEM_S, LIMITS)
def test_a_pool_is_within_its_limits_suffices_and_grows_with_its_backlog(
    items: int, more: int, item_s: float, limits: PoolLimits
) -> None:
    size = workers_wanted([due(items)], {"compose": item_s}, limits)
    assert limits.least <= size <= limits.most
    assert (size == limits.least) if not items else size >= 1
    assert size <= workers_wanted([due(items + more)], {"compose": item_s}, limits)
    if items and size < limits.most:
        rounds = math.ceil(items / (size * limits.threads))
        assert size * limits.threads >= items or rounds * item_s <= limits.drain_s + item_s
    if size > max(1, limits.least):
        assert (size - 1) * limits.threads < items, "nobody would have nothing to do"


@given(st.lists(ITEMS, min_size=1, max_size=60), st.floats(0.1, 100), LIMITS)
def test_a_pool_grows_at_once_and_shrinks_only_after_it_was_too_large_for_a_while(
    backlogs: list[int], item_s: float, limits: PoolLimits
) -> None:
    state, wanted_at = PoolState(size=0), []
    for look, items in enumerate(backlogs):
        now_s = look * EVERY_S
        wanted = workers_wanted([due(items)], {"compose": item_s}, limits)
        wanted_at.append((now_s, wanted))
        after = resized(state, wanted, limits, now_s=now_s)
        assert after.size >= wanted
        assert limits.least <= after.size <= limits.most
        if after.size < state.size:
            lately = [one for at_s, one in wanted_at if at_s >= now_s - limits.cooldown_s]
            assert all(one < state.size for one in lately)
            assert after.size == wanted
        state = after


@given(ITEMS, st.integers(0, 40), ITEM_S, LIMITS)
def test_a_steady_backlog_changes_a_pool_once_and_no_backlog_ends_it(
    items: int, size: int, item_s: float, limits: PoolLimits
) -> None:
    backlog, state, sizes = [due(items)], PoolState(size=min(size, limits.most)), []
    looks = int(limits.cooldown_s / EVERY_S) + 3
    for look in range(2 * looks):
        wanted = workers_wanted(backlog, {"compose": item_s}, limits)
        state = resized(state, wanted, limits, now_s=look * EVERY_S)
        sizes.append(state.size)
    changes = sum(before != after for before, after in itertools.pairwise(sizes))
    assert changes <= 1
    if not items:
        assert sizes[-1] == limits.least


def test_pools_of_cpu_and_gpu_are_sized_apart_and_only_those_that_there_are() -> None:
    backlog = [due(100), due(7, "embed", device="gpu")]
    limits = {"cpu": PoolLimits(most=4, threads=2, drain_s=10), "gpu": PoolLimits(most=9, threads=1, drain_s=10)}
    sizes = pool_sizes(backlog, {"compose": 1.0}, states={}, limits=limits, now_s=0.0)
    assert {device: state.size for device, state in sizes.items()} == {"cpu": 4, "gpu": 7}
    assert set(pool_sizes(backlog, {}, states=sizes, limits={"cpu": limits["cpu"]}, now_s=1.0)) == {"cpu"}


@given(st.floats(0.5, 60), st.integers(1, 16))
def test_the_time_of_an_item_is_measured_from_leases_and_ends(item_s: float, threads: int) -> None:
    times, now_s, seen = ItemTimes(), 1_000.0, {}
    for _ in range(100):
        since_s = times.since_s(now_s)
        done = {"compose": int(threads * (now_s - since_s) / item_s)}
        seen = times.look([due(10_000, leased=threads)], done, now_s=now_s)
        assert now_s - since_s <= WINDOW_S
        now_s += EVERY_S
    assert abs(seen["compose"] - item_s) <= 0.2 * item_s + item_s**2 / (threads * WINDOW_S)
    idle = times.look([], {}, now_s=now_s + 10 * WINDOW_S)
    assert idle == seen, "what was measured stays until there is more"
