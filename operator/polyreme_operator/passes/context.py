"""The context that every pass works with."""

from __future__ import annotations

import dataclasses

from polyreme_api.clock import MonotonicWallClock
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.passes.job_locks import JobLocks
from polyreme_operator.quarantine import Quarantine
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import Observer
from polyreme_operator.work_queue import WorkQueue
from polyreme_operator.writer import Writer


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PassContext:
    """The parts of the operator that its passes share."""

    cluster: CachedCluster
    clock: MonotonicWallClock
    settings: Settings
    queue: WorkQueue
    writer: Writer
    quarantine: Quarantine
    locks: JobLocks
    observer: Observer
