"""Leases of the items that this process works on, renewed by one thread until they are given back."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.registry import work_items
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work_items import Claimed

TTL_S = 30.0
"""A worker that died is replaced after at most so long. Clocks may differ by less; a lease only saves work."""

_log = logging.getLogger(__name__)


class Leases:
    """The leases of one process.

    Args:
        database: Registry.
        owner: Name of this process, unique among all that ever ran.
        now_s: Wall clock [s].
        ttl_s: How long a lease lasts [s].
    """

    def __init__(self, database: Database, owner: str, *, now_s: Callable[[], float], ttl_s: float = TTL_S) -> None:
        self._database, self._owner, self._now_s, self._ttl_s = database, owner, now_s, ttl_s
        self._held: set[str] = set()
        self._lock = threading.Lock()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="leases", daemon=True)
        self._thread.start()

    def claim(self, key: str) -> Claimed | None:
        """Lease an item; None if it is done, not due, or another worker's."""
        claimed = work_items.claim_one(self._database, key, self._owner, now_s=self._now_s(), ttl_s=self._ttl_s)
        if claimed is not None:
            with self._lock:
                self._held.add(key)
        return claimed

    def claim_any(self, flow: str | None, operations: Sequence[str]) -> Claimed | None:
        """Lease any item that is due: for a worker to whom the topics bring nothing."""
        found = work_items.claim(
            self._database, flow, operations, self._owner, now_s=self._now_s(), ttl_s=self._ttl_s, count_max=1
        )
        with self._lock:
            self._held |= {claimed.item.key for claimed in found}
        return found[0] if found else None

    def forget(self, key: str) -> None:
        """Renew an item no longer: it is done."""
        with self._lock:
            self._held.discard(key)

    def release(self, key: str, *, due_s: float, error: str, counts_try: bool) -> None:
        """Give an item back after a failure."""
        self.forget(key)
        work_items.release(self._database, key, self._owner, due_s=due_s, error=error, counts_try=counts_try)

    def close(self) -> None:
        """Stop renewing; what is still held is given back at once, so that no worker waits for it."""
        self._closed.set()
        self._thread.join()
        with self._lock:
            held, self._held = sorted(self._held), set()
        for key in held:
            work_items.release(self._database, key, self._owner, due_s=0.0, error="stopped", counts_try=False)

    def _renew(self) -> None:
        while not self._closed.wait(self._ttl_s / 3):
            with self._lock:
                keys = set(self._held)
            if not keys:
                continue
            try:
                work_items.renew(self._database, keys, self._owner, now_s=self._now_s(), ttl_s=self._ttl_s)
            except EnvironmentFailedError as error:
                # The next round tries again; a lease that runs out costs double work, and nothing else.
                _log.warning("leases are not renewed: %s", error)
