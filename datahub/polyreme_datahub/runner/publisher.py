"""Sends the keys of open items to the topics of their stages, until every one is done.

A topic is a hint: a key may be lost or come twice. What no worker claimed within ``LOST_AFTER_S`` is sent again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from polyreme_datahub.registry import work_items
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.topics.types import Message, Topics

BATCH_MAX = 64
"""Items that one look sends."""
POLL_S = 0.2
PUBLISH_WAIT_S = 1.0
LOST_AFTER_S = 30.0


class Publisher:
    """Publishes from rows.

    Args:
        database: Registry.
        topics: The bus.
        now_s: Wall clock [s].
        flow: The flow whose items are sent; None: every flow.
    """

    def __init__(
        self, database: Database, topics: Topics, *, now_s: Callable[[], float], flow: str | None = None
    ) -> None:
        self._database, self._topics, self._now_s, self._flow = database, topics, now_s, flow
        self._woken = threading.Event()

    def wake(self) -> None:
        """Look now: items were added."""
        self._woken.set()

    def run(self, stopped: threading.Event) -> None:
        """Publish until stopped."""
        while not stopped.is_set():
            if not self.publish_once():
                self._woken.wait(POLL_S)
                self._woken.clear()

    def publish_once(self) -> int:
        """Send what is due; return how many keys were sent."""
        now_s = self._now_s()
        work_items.unpublish_expired(self._database, flow=self._flow, now_s=now_s, lost_after_s=LOST_AFTER_S)
        items = work_items.take_unpublished(self._database, flow=self._flow, now_s=now_s, count_max=BATCH_MAX)
        # Marked before they are sent: a worker may fail an item, and release it, before its message is acknowledged.
        work_items.mark_published(self._database, [item.key for item in items], now_s=now_s)
        sent = 0
        for item in items:
            message = Message(key=item.key, pipeline=item.flow, topic=item.stage, body="{}")
            if not self._topics.publish(message, timeout_s=PUBLISH_WAIT_S):
                work_items.mark_published(self._database, [one.key for one in items[sent:]], now_s=0.0)
                break
            sent += 1
        return sent
