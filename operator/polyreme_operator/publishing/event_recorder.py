"""Writes events with low priority: a bounded, rate-limited queue that drops events rather than wait.

The status is the record; events are best effort. Without a limit, thousands of short jobs would cost the API server
more events than other writes. Events per object are limited too, like in client-go's spam filter.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict, deque
from collections.abc import Callable

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.kinds import KINDS
from polyreme_api.times import rfc3339
from polyreme_cluster.port import ClusterPort, Manifest, PortError
from polyreme_operator.types.actions import EmitEvent

QUEUE_MAX = 1_000
"""Queued events, as many as in client-go."""
OBJECT_BURST = 25
OBJECT_REFILL_S = 300.0
"""Events per object: 25 at once, then one every five minutes, as in client-go."""
OBJECTS_MAX = 4_096
"""Objects whose rate is remembered."""


class EventRecorder:
    """Writes events, warnings first, one after another.

    Args:
        port: The cluster.
        clock: Time of events and waits.
        per_s: Events a second.
        burst: Events that the budget saves up.
        dropped: Called with each dropped event.
    """

    def __init__(
        self, port: ClusterPort, clock: Clock, *, per_s: float, burst: int, dropped: Callable[[EmitEvent], None]
    ) -> None:
        self._port, self._clock, self._dropped = port, clock, dropped
        self._every_s, self._saved_s = 1.0 / per_s, burst / per_s
        self._next_s = -self._saved_s
        self._warnings: deque[EmitEvent] = deque()
        self._others: deque[EmitEvent] = deque()
        self._objects: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """By UID: events that an object has left, and as of when."""
        self._wake = asyncio.Event()

    def put(self, event: EmitEvent) -> None:
        """Queue an event; it is written later or dropped."""
        if not self._allowed(event.uid):
            self._dropped(event)
            return
        if len(self._warnings) + len(self._others) >= QUEUE_MAX:
            if not event.warning or not self._others:
                self._dropped(event)
                return
            self._dropped(self._others.pop())
        (self._warnings if event.warning else self._others).append(event)
        self._wake.set()

    async def run(self) -> None:
        """Write queued events until cancelled."""
        while True:
            while self._warnings or self._others:
                now_s = self._clock.steady_s()
                turn_s = max(self._next_s, now_s - self._saved_s)
                self._next_s = turn_s + self._every_s
                if turn_s > now_s:
                    await self._clock.sleep(turn_s - now_s)
                event = (self._warnings or self._others).popleft()
                try:
                    await self._port.create(self._manifest(event))
                except PortError:
                    # The event exists already or can't be written; the status is the record.
                    continue
            self._wake.clear()
            await self._wake.wait()

    def _allowed(self, uid: str) -> bool:
        now_s = self._clock.steady_s()
        left, since_s = self._objects.pop(uid, (float(OBJECT_BURST), now_s))
        left = min(float(OBJECT_BURST), left + (now_s - since_s) / OBJECT_REFILL_S)
        allowed = left >= 1.0
        self._objects[uid] = (left - 1.0 if allowed else left), now_s
        if len(self._objects) > OBJECTS_MAX:
            self._objects.popitem(last=False)
        return allowed

    def _manifest(self, event: EmitEvent) -> Manifest:
        now = rfc3339(self._clock.now_s())
        return {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {
                "name": f"{labels.job_object_name(event.ref.name, event.uid)}.{event.key}",
                # Events of cluster-scoped objects are stored in this namespace.
                "namespace": event.ref.namespace or "default",
            },
            "involvedObject": {
                "apiVersion": labels.API_VERSION if event.ref.kind in KINDS else "v1",
                "kind": event.ref.kind,
                "namespace": event.ref.namespace,
                "name": event.ref.name,
                "uid": event.uid,
            },
            "reason": event.reason,
            "message": event.message,
            "type": "Warning" if event.warning else "Normal",
            "source": {"component": labels.MANAGER},
            "firstTimestamp": now,
            "lastTimestamp": now,
            "count": 1,
        }
