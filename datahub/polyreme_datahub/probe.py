"""Looks at the servers that the data pipeline needs: whether they answer, and what is due in the registry."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping, Sequence

from polyreme_api.errors import PolyremeError
from polyreme_datahub.objects import check_access
from polyreme_datahub.registry import backlog
from polyreme_datahub.registry.backlog import Backlog, BacklogReader
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.topics.open import open_topics
from polyreme_datahub.topics.types import Topics


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The work of all flows at one time."""

    backlog: Sequence[Backlog]
    done: Mapping[str, int]
    """Items of each operation that ended since the time that was asked for."""


class Probe:
    """The registry, the object store and the topics of a process. Thread-safe.

    Args:
        registry_url: ``sqlite:////absolute/path`` or ``postgresql+psycopg2://...``.
        objects_url: ``file:///absolute/directory`` or ``s3://bucket/prefix``.
        topics_url: ``pulsar://...``; empty: none.
        now_s: Wall clock [s].
    """

    def __init__(self, *, registry_url: str, objects_url: str, topics_url: str, now_s: Callable[[], float]) -> None:
        self._registry_url, self._objects_url, self._topics_url = registry_url, objects_url, topics_url
        self._now_s = now_s
        self._lock = threading.Lock()
        self._opened: tuple[Database, BacklogReader] | None = None
        self._topics: Topics | None = None

    def check(self) -> None:
        """Ask each server something.

        Raises:
            PolyremeError: The first that is wrong or does not answer, in one sentence.
        """
        check_access(self._objects_url)
        with self._lock:
            try:
                self._reader().read(now_s=self._now_s())
                if self._topics_url:
                    self._topics = self._topics or open_topics(self._topics_url)
                    self._topics.check()
            except PolyremeError:
                # The next time opens new connections, which may differ: a changed address, renewed credentials.
                self._close()
                raise

    def work(self, *, since_s: float) -> Work:
        """Return what is due, and what ended since a time.

        Raises:
            PolyremeError: If the registry does not answer.
        """
        with self._lock:
            reader = self._reader()
            assert self._opened is not None
            done = backlog.done_since(self._opened[0], since_s)
            return Work(backlog=reader.read(now_s=self._now_s()), done=done)

    def dead_letters(self) -> dict[str, int]:
        """Count the dead letters of each operation.

        Raises:
            PolyremeError: If the registry does not answer.
        """
        with self._lock:
            self._reader()
            assert self._opened is not None
            return backlog.dead_letters(self._opened[0])

    def close(self) -> None:
        """Close what is open."""
        with self._lock:
            self._close()

    def _reader(self) -> BacklogReader:
        if self._opened is None:
            database = open_database(self._registry_url)
            self._opened = database, BacklogReader(database)
        return self._opened[1]

    def _close(self) -> None:
        if self._opened is not None:
            self._opened[0].close()
        if self._topics is not None:
            self._topics.close()
        self._opened = self._topics = None
