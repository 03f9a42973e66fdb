"""What an installation of the operator may change."""

from __future__ import annotations

import dataclasses

from polyreme_operator.core.manifests import PodDefaults
from polyreme_operator.core.schedule import Limits


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What an installation may change."""

    namespace: str = "polyreme-system"
    """Where the intents lie."""
    defaults: PodDefaults = dataclasses.field(default_factory=PodDefaults)
    relist_s: float = 300.0
    """How often every kind is listed anew, to find what a watch lost."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    """What one round of the scheduler may spend."""
    round_every_s: float = 0.1
    """Least time from the end of one round of the scheduler to the next: what happens meanwhile is decided at once."""
    reconcile_share: float = 0.25
    """Largest share of its time that the operator spends on looking at one job: large gangs change with every pod."""
    reconciles_max: int = 32
    """Jobs reconciled at a time."""
    writes_max: int = 64
    """Objects of one pass, or statuses of one round, written at a time."""
    status_writes_per_s: float = 400.0
    """Budget of status writes that begin no attempt; those that do never wait. An API server of two cores takes 450."""
    status_writes_burst: int = 400
    told_every_s: float = 1.0
    """Least time between two writes of one queue's or topology's status."""
    retry_initial_s: float = 0.05
    retry_max_s: float = 30.0
    idle_s: float = 60.0
    """Longest time that the dispatcher sleeps."""
