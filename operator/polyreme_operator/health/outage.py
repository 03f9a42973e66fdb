"""Outages of so many nodes at once that the view of them, not the nodes, has probably failed: none is fenced then."""

from __future__ import annotations

from collections.abc import Sequence

BURST_S = 60.0
"""Time within which three tenths of all nodes go NotReady in a mass outage."""
NODES_MIN = 3
"""Fewer nodes are never a mass outage: in a small cluster one lost node is a large share."""


def is_mass_outage(not_ready_since_s: Sequence[float], nodes: int) -> bool:
    """Tell whether the nodes that are NotReady now went so together.

    Args:
        not_ready_since_s: Since when each NotReady node is so.
        nodes: Number of all nodes.
    """
    least = max(NODES_MIN, -(-nodes * 3 // 10))
    times = sorted(not_ready_since_s)
    return any(last - first <= BURST_S for first, last in zip(times, times[least - 1 :], strict=False))
