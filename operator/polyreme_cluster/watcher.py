"""Lists and watches one kind for as long as a process runs, into what the process keeps of the cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import NoReturn, Protocol

from polyreme_api.clock import Clock
from polyreme_api.errors import RetryableError
from polyreme_cluster.port import ClusterPort, GoneError, ListPage, NotFoundError, PortError, WatchEvent, pages_of

_log = logging.getLogger(__name__)


class Mirror(Protocol):
    """What a process keeps of one kind, or of several."""

    def put_page(self, kind: str, page: ListPage, *, first: bool) -> None:
        """Keep the objects of a page; the first one of a list begins it."""

    def end_list(self, kind: str, *, version: int) -> None:
        """Drop what no page has named since the first one: there was no such object at this version."""

    def apply(self, kind: str, event: WatchEvent) -> None:
        """Apply an event."""

    def clear(self, kind: str) -> None:
        """Note that the kind's definition is not installed: there are no objects."""

    def broken(self, kind: str) -> bool:
        """Note that the watch failed, and return whether to list again when the API server answers."""


async def follow(
    port: ClusterPort,
    kind: str,
    mirror: Mirror,
    clock: Clock,
    *,
    namespace: str | None = None,
    relist_s: Callable[[], float],
    backoff_s: Callable[[int], float],
) -> NoReturn:
    """List and watch one kind, forever.

    Args:
        port: The cluster.
        kind: The kind.
        mirror: Gets what is listed and watched.
        clock: Time of lists and retries.
        namespace: Of the objects; None: all.
        relist_s: Time from one list to the next.
        backoff_s: Wait before the next try, from how many have failed since something was seen.
    """
    failures, version, relist_at_s = 0, None, 0.0
    while True:
        try:
            if version is None or clock.steady_s() >= relist_at_s:
                version = await _list(port, kind, mirror, namespace)
                relist_at_s = clock.steady_s() + relist_s()
                failures = 0
            async with asyncio.timeout(max(0.0, relist_at_s - clock.steady_s())):
                async for event in port.watch(kind, resource_version=version, namespace=namespace):
                    version = event.resource_version
                    failures = 0
                    mirror.apply(kind, event)
        except TimeoutError:
            continue
        except GoneError as error:
            version = None
            _log.debug("listing %s again: %s", kind, error)
        except NotFoundError:
            # The CRD is not installed yet, or not any more, so there are no objects of this kind for now.
            version = None
            mirror.clear(kind)
        except PortError as error:
            # Permission errors are retried too: an API server that has just started has not loaded its RBAC yet.
            level = logging.INFO if isinstance(error, RetryableError) else logging.WARNING
            _log.log(level, "watch of %s failed: %s", kind, error)
            if mirror.broken(kind):
                version = None
        failures += 1
        await clock.sleep(backoff_s(failures))


async def _list(port: ClusterPort, kind: str, mirror: Mirror, namespace: str | None) -> str:
    first = True
    async for page in pages_of(port, kind, namespace=namespace):
        mirror.put_page(kind, page, first=first)
        first = False
    mirror.end_list(kind, version=int(page.resource_version))
    return page.resource_version
