"""Ratios of bench-loader: medians over the rounds, each to the best peer of its round."""

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.loader.contenders import SAME

Round = dict[str, dict[str, Any]]
KINDS = ("samples_per_s", "cpu_ms_per_sample", "processors", "first_batch_s", "pss_over_import_mib")
PACK_KINDS = ("patches_per_s", "cpu_ms_per_1000_patches", "processors", "first_batch_s", "fill", "patches_per_token")


def of_warm(rounds: Sequence[Round], peers: Sequence[str]) -> dict[str, Any]:
    """Return the figures of data on the disk."""
    figures = _ratios(rounds, peers, ("warm_peer_ratio", "samples_per_s"), ("cpu_peer_ratio", "cpu_ms_per_sample"))
    figures |= _ratios(
        rounds,
        [_same(rounds, peer) for peer in peers],
        ("warm_same_resizer_ratio", "samples_per_s"),
        ("cpu_same_resizer_ratio", "cpu_ms_per_sample"),
    )
    lags = [one["ours_engine"]["first_batch_s"] - one["ours"]["first_batch_s"] for one in rounds]
    figures["engine_first_batch_lag_s"] = round(statistics.median(lags), 3)
    figures["engine_start_s"] = round(statistics.median(one["ours_engine"]["engine_start_s"] for one in rounds), 3)
    figures["pss_over_import_mib"] = round(statistics.median(one["ours"]["pss_over_import_mib"] for one in rounds), 1)
    return figures | _each(rounds, "warm", KINDS)


def of_cold(rounds: Sequence[Round], peers: Sequence[str]) -> dict[str, Any]:
    """Return the figures of data in a bucket."""
    figures = _ratios(rounds, peers, ("cold_peer_ratio", "samples_per_s"), ("cold_cpu_ratio", "cpu_ms_per_sample"))
    return figures | _each(rounds, "cold", KINDS)


def of_full(rounds: Sequence[Round], peers: Sequence[str]) -> dict[str, Any]:
    """Return the figures of a mixture in packs; patches count, since they are nearly all of the work."""
    kinds = ("patches_per_s", "cpu_ms_per_1000_patches")
    figures = _ratios(rounds, peers, ("full_peer_ratio", kinds[0]), ("full_cpu_ratio", kinds[1]))
    figures |= _ratios(
        rounds,
        [_same(rounds, peer) for peer in peers],
        ("full_same_resizer_ratio", kinds[0]),
        ("full_cpu_same_resizer_ratio", kinds[1]),
    )
    return figures | _each(rounds, "full", PACK_KINDS)


def _same(rounds: Sequence[Round], peer: str) -> str:
    """Return the name under which a peer makes its pixels by our function."""
    return f"{peer}{SAME}" if f"{peer}{SAME}" in rounds[0] else peer


def _ratios(
    rounds: Sequence[Round], peers: Sequence[str], speed: tuple[str, str], cost: tuple[str, str]
) -> dict[str, float]:
    """Return the engine's speed over the fastest peer's, and its cost over the cheapest peer's."""

    def median(kind: str, best: Callable[..., float]) -> float:
        ratios = [one["ours_engine"][kind] / best(one[peer][kind] for peer in peers) for one in rounds]
        return float(round(statistics.median(ratios), 3))

    return {speed[0]: median(speed[1], max), cost[0]: median(cost[1], min)}


def _each(rounds: Sequence[Round], part: str, kinds: Sequence[str]) -> dict[str, float]:
    return {
        f"{part}_{name}_{kind}": round(statistics.median(one[name][kind] for one in rounds), 2)
        for name in rounds[0]
        for kind in kinds
    }
