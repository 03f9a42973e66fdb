"""Serves ``ClusterPort.watch`` of our own kinds from kopf's watches; other calls go to the wrapped port.

kopf reports events through ``on.event`` alone: no finalizer, no annotation, no patch. Lists find what kopf misses: an
object that is deleted while kopf has no connection causes no event. When kopf reports known objects again, it has
listed again, so the watch ends with ``GoneError``. A watch also ends shortly after the start, and then every minute.
"""

from __future__ import annotations

import asyncio
import collections
import logging
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

import kopf

from polyreme_api.clock import Clock
from polyreme_api.labels import GROUP, VERSION
from polyreme_cluster.adapters.kubernetes.resources import resource_of, tidy
from polyreme_cluster.forwarding_port import ForwardingPort
from polyreme_cluster.port import (
    PAGE_OBJECTS,
    ClusterPort,
    GoneError,
    ListPage,
    Manifest,
    PortError,
    WatchEvent,
    WatchEventType,
)

_log = logging.getLogger(__name__)

EVENTS_MAX = 1_000
"""Buffered events of a kind; a watch that is further back must list again."""
LIST_FIRST_S = 5.0
"""kopf's first list may be later than ours: what was deleted between them is in neither."""
SERVED_S = 2.0
"""Delay between attempts to list a kind whose definition may not be installed yet."""
LIST_S = 60.0
"""How often a watch of our kinds ends, so that a list finds missed changes."""


class Feed:
    """Buffer of the newest events of one kind, in order of arrival.

    Args:
        kind: Which.
        events_max: How many are kept.
    """

    def __init__(self, kind: str, *, events_max: int = EVENTS_MAX) -> None:
        self._kind = kind
        self._events: collections.deque[WatchEvent] = collections.deque(maxlen=events_max)
        self._count = 0
        """Number of all events so far; ``_count - len(_events)`` of them have been dropped."""
        self._dropped = 0
        """Newest version of the dropped events."""
        self._newest = 0
        """Newest version of all events."""
        self._lists = 0
        """Number of kopf's lists noticed so far."""
        self._listed: dict[str, int] = {}
        """By UID: how many of these lists came before or with this object's last event."""
        self._came = asyncio.Event()

    def put(self, event_type: str | None, manifest: Manifest) -> None:
        """Take one event of kopf; type None marks an object of a list."""
        uid = str(manifest["metadata"]["uid"])
        if event_type == WatchEventType.DELETED:
            self._listed.pop(uid, None)
            type_ = WatchEventType.DELETED
        else:
            type_ = WatchEventType.MODIFIED if event_type is None else WatchEventType(event_type)
            self._note_list(uid, listed=event_type is None)
        if len(self._events) == self._events.maxlen:
            self._dropped = max(self._dropped, int(self._events[0].resource_version))
        self._events.append(WatchEvent(type=type_, object=manifest))
        self._newest = max(self._newest, int(self._events[-1].resource_version))
        self._count += 1
        self._came.set()

    @property
    def newest(self) -> int:
        """Newest version of any event."""
        return self._newest

    def void(self) -> None:
        """Drop all events, since the cluster was restored from a backup."""
        self._events.clear()
        self._dropped = self._newest = 0

    async def follow(self, version: int, *, until: asyncio.Future[None]) -> AsyncIterator[WatchEvent]:
        """Yield buffered and future events that are newer than ``version``.

        Raises:
            GoneError: If events were dropped, kopf listed again, or ``until`` is done: list, and watch from there.
        """
        if version < self._dropped:
            raise self._gone(f"events up to {self._dropped} were dropped, {version} was requested")
        at, lists = self._count - len(self._events), self._lists
        while True:
            while at < self._count:
                kept = self._count - len(self._events)
                if at < kept:
                    raise self._gone(f"{kept - at} events were dropped unread")
                event = self._events[at - kept]
                at += 1
                if int(event.resource_version) > version:
                    yield event
            if lists != self._lists:
                raise self._gone("kopf listed again; objects deleted meanwhile are in no event")
            if until.done():
                raise self._gone("a periodic list is due")
            self._came.clear()
            waiting: asyncio.Future[Any] = asyncio.ensure_future(self._came.wait())
            try:
                await asyncio.wait({waiting, until}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()

    def _note_list(self, uid: str, *, listed: bool) -> None:
        if not listed:
            self._listed.setdefault(uid, self._lists)
            return
        count = self._listed.get(uid)
        if count is not None and count >= self._lists:
            # The object is listed again, so the connection was lost. The other objects of this list follow.
            self._lists += 1
        self._listed[uid] = self._lists

    def _gone(self, why: str) -> GoneError:
        return GoneError(f"events of {self._kind} are gone: {why}")


class KopfFeed(ForwardingPort):
    """Wraps a cluster so that kopf watches our own kinds.

    Args:
        port: The port that it wraps.
        kinds: Kinds of our group that are watched.
        clock: Time of the periodic lists.
        only: By kind, the one namespace that is listed and watched.
    """

    def __init__(
        self, port: ClusterPort, kinds: Sequence[str], clock: Clock, *, only: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(port)
        self._clock, self._only = clock, dict(only or {})
        self._feeds = {kind: Feed(kind) for kind in kinds}
        self._list_s = dict.fromkeys(kinds, LIST_FIRST_S)

    def register(self, registry: kopf.OperatorRegistry) -> None:
        """Register a kopf handler for each kind."""
        for kind, feed in self._feeds.items():
            self._register_one(registry, kind, feed)

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List one page of a kind."""
        namespace, feed = namespace or self._only.get(kind), self._feeds.get(kind)
        newest = 0 if feed is None else feed.newest
        page = await super().list(kind, namespace=namespace, limit=limit, continue_=continue_)
        if feed is not None and continue_ is None and int(page.resource_version) < newest:
            feed.void()
        return page

    def watch(self, kind: str, *, resource_version: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        """Yield events after ``resource_version``."""
        namespace = namespace or self._only.get(kind)
        feed = self._feeds.get(kind)
        if feed is None:
            return super().watch(kind, resource_version=resource_version, namespace=namespace)
        return self._follow(feed, kind, int(resource_version), namespace)

    async def _follow(self, feed: Feed, kind: str, version: int, namespace: str | None) -> AsyncIterator[WatchEvent]:
        until = asyncio.ensure_future(self._clock.sleep(self._list_s[kind]))
        try:
            async for event in feed.follow(version, until=until):
                if namespace is None or event.object["metadata"].get("namespace") == namespace:
                    yield event
        finally:
            if until.done():
                self._list_s[kind] = min(LIST_S, 2 * self._list_s[kind])
            until.cancel()

    def _register_one(self, registry: kopf.OperatorRegistry, kind: str, feed: Feed) -> None:
        @kopf.on.event(GROUP, VERSION, resource_of(kind).plural, registry=registry, id=f"feed-{kind}")
        async def tell(event: Mapping[str, Any], **_: Any) -> None:
            manifest = dict(event["object"])
            manifest["metadata"] = dict(manifest["metadata"])
            feed.put(event["type"], tidy(manifest, kind))


async def wait_until_served(port: ClusterPort, kinds: Sequence[str], clock: Clock) -> None:
    """Wait for the definitions of kinds, since kopf looks for them only once, at its start."""
    for kind in kinds:
        said = ""
        while True:
            try:
                await port.list(kind, limit=1)
            except PortError as error:
                if str(error) != said:
                    _log.warning("can't list %s, retrying every %g s: %s", kind, SERVED_S, error)
                said = str(error)
                await clock.sleep(SERVED_S)
            else:
                break


def own_kinds(kinds: Sequence[str]) -> list[str]:
    """Return the kinds of our own API group."""
    return [kind for kind in kinds if resource_of(kind).api_version == f"{GROUP}/{VERSION}"]
