"""What one round of decisions may spend; what is left over is the next round's."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of one round. A round that meets one asks for another round at once."""

    admissions_max: int = 256
    """Attempts begun. Their intents lie in one ConfigMap, at about 0.3 KiB each; it holds 1 MiB at most."""
    placement_nodes_max: int = 1_500_000
    """Nodes and workers looked at for placements: about half a second of one core."""
    preemptions_max: int = 2
    """Jobs for which victims are looked for."""
    reserved_heads_max: int = 4
    """Heads of queues for which nodes are held."""
    resizes_max: int = 64
    """Running jobs whose size is looked at."""
    sizes_max: int = 4
    """Sizes tried for one elastic job."""
