"""Place of a rank in the gang; apart from what imports torch, which the parent does without."""

from __future__ import annotations

import dataclasses
from pathlib import Path


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """Which rank of a gang."""

    rank: int
    world: int
    port: int
    """Where ranks meet."""
    folder: Path
    """For checkpoints; none is written."""
    page: str
    """The rank's page."""
