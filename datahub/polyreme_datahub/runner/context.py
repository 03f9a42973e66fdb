"""The context of work in its process: stores, clocks, threads, and the sources that it has opened."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.registry import results
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.rows import OperationCount, Results
from polyreme_datahub.registry.work_items import WorkItem
from polyreme_datahub.runner.owners import owner_name
from polyreme_datahub.sandbox.tasks import Limits
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import Source
from polyreme_datahub.topics.types import Topics

OnCounts = Callable[[WorkItem, Sequence[OperationCount]], None]
"""Takes what a commit added; called from worker threads."""
OnItem = Callable[[WorkItem, float, bool], None]
"""Takes an item, the time that a try of it took [s], and whether it is done."""
DEFAULT_WORKERS = 2
BACKOFF_S = 0.1
SOURCES_MAX = 64
"""Opened sources that a process keeps: a worker of all flows lives for months."""


class Sources:
    """Opened sources, shared by the threads of a process; the ones used last are kept."""

    def __init__(self) -> None:
        self._opened: OrderedDict[int, Future[Source]] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, version: DatasetVersion, lakehouse: Lakehouse) -> Source:
        """Return the source of a version; its listing lies in the lakehouse.

        One thread opens it, and the others that want the same one wait for it. An error is that of all of them, and
        the next one opens it again.
        """
        with self._lock:
            known = self._opened.get(version.id)
            opening = self._opened[version.id] = known or Future()
            self._opened.move_to_end(version.id)
            while len(self._opened) > SOURCES_MAX:
                self._opened.popitem(last=False)
        if known is None:
            try:
                opening.set_result(open_source(version.source, lakehouse))
            except BaseException as error:
                with self._lock:
                    self._opened.pop(version.id, None)
                opening.set_exception(error)
                raise
        return opening.result()


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunContext:
    """What work needs of its process."""

    database: Database
    lakehouse: Lakehouse
    owner: str = dataclasses.field(default_factory=owner_name)
    """Name of this process, unique among all that ever ran."""
    now_s: Callable[[], float] = time.time  # noqa: TID251 - the shell's default
    steady_s: Callable[[], float] = time.monotonic  # noqa: TID251 - the shell's default
    workers: int = DEFAULT_WORKERS
    """Threads of this process."""
    only_seals: bool = False
    """Whether flows are left to workers of other processes, and this one waits for them and seals."""
    topics: Topics | None = None
    """The bus between processes; None: this process works alone."""
    on_item: OnItem | None = None
    """Called after each try of an item, from worker threads."""
    limits: Limits = dataclasses.field(default_factory=Limits)
    backoff_s: float = BACKOFF_S
    """Wait after the first failure [s]."""
    sources: Sources = dataclasses.field(default_factory=Sources)

    def finish(self, item: WorkItem, made: Results, *, children: Sequence[WorkItem] = (), on_counts: OnCounts) -> None:
        """Commit what ends an item, and the items that follow from its end."""
        now_s = self.now_s()
        results.commit(self.database, made, finished=item, owner=self.owner, children=children, now_s=now_s)
        on_counts(item, made.counts)


def ignore_counts(item: WorkItem, counts: Sequence[OperationCount]) -> None:
    """Take the counts of flows that others wait for."""
