"""Sends the keys of open items to the topics of their chains, until every one is done.

A topic is a hint: a key may be lost or come twice. What no worker claimed within ``LOST_AFTER_S`` is sent again. While
the bus is away nothing is sent; workers then find items in the registry.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.registry import work_items
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.topics.types import Message, Topics

BATCH_MAX = 64
"""Items that one look sends."""
POLL_S = 0.2
PUBLISH_WAIT_S = 1.0
LOST_AFTER_S = 30.0

_log = logging.getLogger(__name__)


class Publisher:
    """Publishes from rows.

    Args:
        context: What work needs of its process.
        topics: The bus.
        operations: Chains whose items are sent.
        flow: The flow whose items are sent; None: every flow.
    """

    def __init__(self, context: RunContext, topics: Topics, operations: Sequence[str], *, flow: str | None) -> None:
        self._database, self._now_s = context.database, context.now_s
        self._topics, self._operations, self._flow = topics, tuple(operations), flow
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
        items = work_items.take_unpublished(
            self._database, flow=self._flow, operations=self._operations, now_s=now_s, count_max=BATCH_MAX
        )
        if not items:
            return 0
        # Marked before they are sent: a worker may fail an item, and release it, before its message is acknowledged.
        work_items.mark_published(self._database, [item.key for item in items], now_s=now_s)
        messages = [Message(key=item.key, pipeline=item.flow, topic=item.operation, body="{}") for item in items]
        try:
            taken = {message.key for message in self._topics.publish_all(messages, timeout_s=PUBLISH_WAIT_S)}
        except EnvironmentFailedError as error:
            _log.warning("work is not published: %s", error)
            taken = set()
        if left := [message.key for message in messages if message.key not in taken]:
            work_items.mark_published(self._database, left, now_s=0.0)
        return len(taken)
