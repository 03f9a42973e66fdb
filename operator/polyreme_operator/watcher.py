"""The operator's mirror of the cluster: what is listed and watched goes into the cache."""

from __future__ import annotations

import functools
import logging
import random
from collections.abc import Callable

from polyreme_api.clock import MonotonicWallClock
from polyreme_cluster.port import ClusterPort, ListPage, ObjectRef, WatchEvent
from polyreme_cluster.watcher import follow
from polyreme_operator.cache.kinds import watched_kinds
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.settings import Settings
from polyreme_operator.types.changes import Changes

STEP_REPORTED_S = 1.0
"""Smallest step of the wall clock that is logged."""

_log = logging.getLogger(__name__)


class Watcher:
    """Keeps the cache up to date.

    Args:
        port: The cluster.
        clock: Time of lists and retries.
        cache: The cache.
        settings: Settings of the installation.
        rng: Jitter of lists and retries.
        note: Called with the effects of each change.
    """

    def __init__(
        self,
        port: ClusterPort,
        clock: MonotonicWallClock,
        cache: ClusterCache,
        settings: Settings,
        rng: random.Random,
        *,
        note: Callable[[Changes], None],
    ) -> None:
        self._port, self._clock, self._cache, self._settings, self._rng = port, clock, cache, settings, rng
        self._note = note
        self._unsynced = set(watched_kinds(health=settings.node_health))
        self._listed: dict[str, set[ObjectRef]] = {}
        self._stepped_s = 0.0
        """The last reported step of the wall clock."""
        self._leases_unwatched_since_s: float | None = None
        """Since when the watch of Leases is broken; no leader counts as silent meanwhile."""

    @property
    def synced(self) -> bool:
        """Whether every kind has been listed: nothing is decided before."""
        return not self._unsynced

    @property
    def leases_unwatched(self) -> bool:
        """Whether the watch of Leases is broken at the moment."""
        return self._leases_unwatched_since_s is not None

    async def follow(self, kind: str) -> None:
        """List and watch one kind, forever."""
        settings, rng = self._settings, self._rng
        await follow(
            self._port,
            kind,
            self,
            self._clock,
            # Of all ConfigMaps only those in the operator's own namespace matter.
            namespace=settings.namespace if kind == "ConfigMap" else None,
            relist_s=lambda: settings.relist_s * (0.75 + rng.random() / 2),
            backoff_s=functools.partial(settings.jittered_backoff_s, rng=rng),
        )

    def put_page(self, kind: str, page: ListPage, *, first: bool) -> None:
        """Put the objects of a page into the cache."""
        now_s, version = self._clock.now_s(), int(page.resource_version)
        if first:
            newest = self._cache.seen.newest(kind)
            if version < newest:
                self._cache.void_versions(f"{kind} is listed at version {version} and was seen at {newest}")
            self._listed[kind] = set()
        for manifest in page.items:
            self._listed[kind].add(ObjectRef.of(manifest))
            self._note(self._cache.put(manifest, now_s=now_s, listed_at=version))

    def end_list(self, kind: str, *, version: int) -> None:
        """Forget what the list did not name."""
        changes = self._cache.forget_unlisted(kind, self._listed.pop(kind), version=version)
        if kind == "Lease" and self._leases_unwatched_since_s is not None:
            outage_s = self._clock.steady_s() - self._leases_unwatched_since_s
            self._leases_unwatched_since_s = None
            self._cache.leases.excuse_silence(outage_s, now_s=self._clock.now_s())
        self._note(changes | self._synced(kind))
        self._report_step()

    def apply(self, kind: str, event: WatchEvent) -> None:
        """Apply an event to the cache."""
        del kind
        self._note(self._cache.apply(event, now_s=self._clock.now_s()))

    def clear(self, kind: str) -> None:
        """Count a kind that is not installed as listed."""
        self._note(self._synced(kind))

    def broken(self, kind: str) -> bool:
        """Note since when Leases are unwatched: all are listed afterwards, since renewals may be missed until then."""
        if kind != "Lease" or self._leases_unwatched_since_s is not None:
            return False
        self._leases_unwatched_since_s = self._clock.steady_s()
        return True

    def _report_step(self) -> None:
        stepped_s = self._clock.stepped_s()
        if abs(stepped_s - self._stepped_s) >= STEP_REPORTED_S:
            self._stepped_s = stepped_s
            _log.warning(
                "the wall clock is %+.1f s off the time that has passed since this replica became leader; decisions "
                "and records use the latter until another replica leads",
                stepped_s,
            )

    def _synced(self, kind: str) -> Changes:
        """Note that a kind has been listed: nothing is decided before all of them are."""
        first = kind in self._unsynced
        self._unsynced.discard(kind)
        return Changes(asks=first)
