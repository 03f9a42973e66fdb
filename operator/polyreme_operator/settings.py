"""What an installation of the operator may change."""

from __future__ import annotations

import dataclasses

from polyreme_operator.core.manifests import PodDefaults


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an installation may change."""

    namespace: str = "polyreme-system"
    """Where the intents lie."""
    defaults: PodDefaults = dataclasses.field(default_factory=PodDefaults)
    relist_s: float = 300.0
    """How often every kind is listed anew, to find what a watch lost."""
    reconciles_max: int = 32
    """Jobs reconciled at a time."""
    writes_max: int = 32
    """Objects of one pass written at a time."""
    status_writes_per_s: float = 50.0
    """Budget of status writes that begin no attempt; those that do never wait."""
    status_writes_burst: int = 100
    retry_initial_s: float = 0.05
    retry_max_s: float = 30.0
    idle_s: float = 60.0
    """Longest time that the dispatcher sleeps."""
