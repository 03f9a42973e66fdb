"""How many samples each held-out set gives."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from polyreme_datahub.loader.evaluation import shared


@given(st.lists(st.integers(0, 400), min_size=1, max_size=8), st.integers(0, 1000))
def test_samples_are_shared_evenly_and_never_wasted(sizes: list[int], total_max: int) -> None:
    counts = shared(sizes, total_max)
    assert sum(counts) == min(total_max, sum(sizes))
    assert all(0 <= count <= size for count, size in zip(counts, sizes, strict=True))
    unfilled = [count for count, size in zip(counts, sizes, strict=True) if count < size]
    # A set that could give more gives at most one sample less than any other.
    assert not unfilled or max(counts) - min(unfilled) <= 1
