"""Lists and watches every kind into the cache, for as long as the operator runs."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable

from polyreme_api.clock import MonotonicWallClock
from polyreme_api.errors import RetryableError
from polyreme_cluster.port import ClusterPort, GoneError, NotFoundError, ObjectRef, PortError, pages_of
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
        failures = 0
        version: str | None = None
        relist_at_s = 0.0
        while True:
            try:
                if version is None or self._clock.steady_s() >= relist_at_s:
                    version = await self._list(kind)
                    relist_at_s = self._clock.steady_s() + self._settings.relist_s * (0.75 + self._rng.random() / 2)
                    failures = 0
                async with asyncio.timeout(max(0.0, relist_at_s - self._clock.steady_s())):
                    events = self._port.watch(kind, resource_version=version, namespace=self._namespace(kind))
                    async for event in events:
                        version = event.resource_version
                        failures = 0
                        self._note(self._cache.apply(event, now_s=self._clock.now_s()))
                failures += 1
            except TimeoutError:
                continue
            except GoneError as error:
                version = None
                failures += 1
                _log.debug("listing %s again: %s", kind, error)
            except NotFoundError:
                # The CRD is not installed yet, or not any more, so there are no objects of this kind for now.
                version = None
                failures += 1
                self._note(self._synced(kind))
            except PortError as error:
                # Permission errors are retried too: an API server that has just started has not loaded its RBAC yet.
                failures += 1
                level = logging.INFO if isinstance(error, RetryableError) else logging.WARNING
                _log.log(level, "watch of %s failed: %s", kind, error)
                if kind == "Lease" and self._leases_unwatched_since_s is None:
                    # List all Leases when the watch works again, since renewals may be missed until then.
                    self._leases_unwatched_since_s, version = self._clock.steady_s(), None
            await self._clock.sleep(self._settings.jittered_backoff_s(failures, self._rng))

    async def _list(self, kind: str) -> str:
        listed: set[ObjectRef] = set()
        newest, first, version = self._cache.seen.newest(kind), True, 0
        async for page in pages_of(self._port, kind, namespace=self._namespace(kind)):
            now_s, version = self._clock.now_s(), int(page.resource_version)
            if first and version < newest:
                self._cache.void_versions(f"{kind} is listed at version {version} and was seen at {newest}")
            for manifest in page.items:
                listed.add(ObjectRef.of(manifest))
                self._note(self._cache.put(manifest, now_s=now_s, listed_at=version))
            first = False
        changes = self._cache.forget_unlisted(kind, listed, version=version)
        if kind == "Lease" and self._leases_unwatched_since_s is not None:
            outage_s = self._clock.steady_s() - self._leases_unwatched_since_s
            self._leases_unwatched_since_s = None
            self._cache.leases.excuse_silence(outage_s, now_s=self._clock.now_s())
        self._note(changes | self._synced(kind))
        self._report_step()
        return page.resource_version

    def _report_step(self) -> None:
        stepped_s = self._clock.stepped_s()
        if abs(stepped_s - self._stepped_s) >= STEP_REPORTED_S:
            self._stepped_s = stepped_s
            _log.warning(
                "the wall clock is %+.1f s off the time that has passed since this replica became leader; decisions "
                "and records use the latter until another replica leads",
                stepped_s,
            )

    def _namespace(self, kind: str) -> str | None:
        """Return the namespace to watch: of all ConfigMaps only those in the operator's own matter."""
        return self._settings.namespace if kind == "ConfigMap" else None

    def _synced(self, kind: str) -> Changes:
        """Note that a kind has been listed: nothing is decided before all of them are."""
        first = kind in self._unsynced
        self._unsynced.discard(kind)
        return Changes(asks=first)
