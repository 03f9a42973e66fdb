"""The breaker: never more nodes out than it allows, latched until a person resets it."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from polyreme_operator.health.breaker import BreakerState, Granted, grant, limit_of, settled
from polyreme_operator.health.outage import is_mass_outage

NODES = tuple(f"n{number}" for number in range(20))


def _ask(
    state: BreakerState, wanted: Sequence[str], *, out: Collection[str] = (), reset: str = "", now_s: float = 0.0
) -> Granted:
    state = settled(state, out=out, wanted=wanted, present=NODES, reset=reset, window_s=300.0, now_s=now_s)
    return grant(state, wanted, out=out, limit=limit_of(len(NODES), 10), now_s=now_s)


def test_the_limit_is_a_share_and_one_at_least() -> None:
    assert [limit_of(nodes, 10) for nodes in (1, 9, 20, 1500)] == [1, 1, 2, 150]


def test_a_charge_is_granted_within_the_limit() -> None:
    assert _ask(BreakerState(), ["n0", "n1"]).nodes == {"n0", "n1"}


def test_a_demand_beyond_the_limit_grants_nothing_and_latches_until_a_reset() -> None:
    refused = _ask(BreakerState(), ["n0", "n1", "n2"])
    assert not refused.nodes
    assert refused.state.latched
    assert not _ask(refused.state, ["n0"]).nodes
    again = _ask(refused.state, ["n0"], reset="looked")
    assert again.nodes == {"n0"}
    assert not _ask(refused.state, ["n0", "n1", "n2"], reset="looked").nodes


def test_nodes_that_are_out_count_whatever_tainted_them() -> None:
    assert _ask(BreakerState(), ["n0"], out=["n8", "n9"]).state.latched


def test_a_charge_that_is_stored_is_granted_again_after_a_crash() -> None:
    charged = _ask(BreakerState(), ["n0", "n1"]).state
    assert _ask(charged, ["n0", "n1"]).nodes == {"n0", "n1"}


def test_a_charge_counts_until_the_window_is_over_so_that_a_flapping_detector_latches() -> None:
    state = _ask(BreakerState(), ["n0"]).state
    state = _ask(state, [], out=["n0"], now_s=10.0).state
    state = _ask(state, ["n1"], out=[], now_s=20.0).state
    assert _ask(state, ["n2"], out=["n1"], now_s=30.0).state.latched
    assert _ask(state, ["n2"], out=["n1"], now_s=400.0).nodes == {"n2"}


def test_a_third_of_the_nodes_within_a_minute_is_an_outage_of_the_view() -> None:
    assert is_mass_outage([0.0, 30.0, 60.0], 10)
    assert not is_mass_outage([0.0, 30.0, 61.0], 10)
    assert not is_mass_outage([0.0, 1.0], 3)
