"""Budgets of one scheduling cycle; the remaining work is done by the next cycle."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one cycle. A cycle that reaches one requests another cycle at once."""

    admissions_max: int = 256
    """Attempts begun. Their intents are stored in one ConfigMap of at most 1 MiB, at about 0.3 KiB each."""
    placement_nodes_max: int = 1_500_000
    """Nodes and workers examined for placements: about half a second of one core."""
    preemptions_max: int = 2
    """Jobs for which victims are searched."""
    reserved_heads_max: int = 4
    """Heads of queues for which nodes are reserved."""
    resizes_max: int = 64
    """Running jobs considered for a resize."""
    sizes_max: int = 4
    """Sizes tried for one elastic job."""
    grow_cooldown_s: float = 300.0
    """Shortest time that an attempt runs before it is ended to grow."""
