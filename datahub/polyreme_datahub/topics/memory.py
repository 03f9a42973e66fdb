"""The bus inside one process: bounded queues, loans, redelivery with a delay.

It keeps nothing on disk and need not: every due message stands in the registry's outbox until its results are
committed.
"""

from __future__ import annotations

import dataclasses
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from polyreme_datahub.topics.types import Delivery, Message

QUEUE_MAX = 256
"""Messages that wait in one topic before publishers wait."""


@dataclasses.dataclass(slots=True)
class _Group:
    ready: deque[tuple[Message, int]]
    delayed: list[tuple[float, int, Message, int]]
    loans: dict[int, tuple[object, Message, int]]


class InProcessTopics:
    """Topics in memory."""

    def __init__(self, *, steady_s: Callable[[], float] = time.monotonic, queue_max: int = QUEUE_MAX) -> None:  # noqa: TID251
        self._steady_s = steady_s
        self._queue_max = queue_max
        self._groups: dict[tuple[str, str], _Group] = {}
        self._changed = threading.Condition()
        self._next_id = 0
        self._closed = False

    def publish(self, message: Message, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        """Send a message to every group of its topic, to be delivered after ``delay_s``.

        Returns:
            False when a group stayed full for ``timeout_s``; then no group got the message.
        """
        with self._changed:
            groups = [group for (topic, _), group in self._groups.items() if topic == message.topic]
            free = self._changed.wait_for(lambda: all(self._waiting(g) < self._queue_max for g in groups), timeout_s)
            if not free:
                return False
            for group in groups:
                if delay_s > 0:
                    self._next_id += 1
                    heapq.heappush(group.delayed, (self._steady_s() + delay_s, self._next_id, message, 0))
                else:
                    group.ready.append((message, 0))
            self._changed.notify_all()
            return True

    def subscribe(self, topics: Sequence[str], *, group: str) -> InProcessSubscription:
        """Join a group of consumers; topics and groups are made as they are named."""
        with self._changed:
            for topic in topics:
                self._groups.setdefault((topic, group), _Group(ready=deque(), delayed=[], loans={}))
        return InProcessSubscription(self, [(topic, group) for topic in topics])

    def wait_idle(self, *, timeout_s: float) -> bool:
        """Wait until no message waits or is on loan; False when ``timeout_s`` passes before."""

        def done() -> bool:
            return all(not self._waiting(group) and not group.loans for group in self._groups.values())

        with self._changed:
            return self._changed.wait_for(done, timeout_s)

    @property
    def closed(self) -> bool:
        """Whether the bus was closed."""
        return self._closed

    def close(self) -> None:
        """Wake every receiver; they get nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(
        self, places: Sequence[tuple[str, str]], holder: object, *, count_max: int, timeout_s: float
    ) -> list[Delivery]:
        """Lend messages to ``holder``, later topics first: what is nearly done is done first."""
        until_s = self._steady_s() + timeout_s
        with self._changed:
            while not self._closed:
                taken = self._lend(places, holder, count_max)
                left_s = until_s - self._steady_s()
                if taken or left_s <= 0:
                    return taken
                self._changed.wait(min(left_s, self._next_due_s(places)))
            return []

    def give_back(self, place: tuple[str, str], loan: int, *, delay_s: float | None) -> None:
        """End a loan: for good, or (``delay_s``) to be lent again."""
        with self._changed:
            _, message, redeliveries = self._groups[place].loans.pop(loan, (None, None, 0))
            if message is not None and delay_s is not None:
                due = (self._steady_s() + delay_s, loan, message, redeliveries + 1)
                heapq.heappush(self._groups[place].delayed, due)
            self._changed.notify_all()

    def leave(self, places: Sequence[tuple[str, str]], holder: object) -> None:
        """Take back every loan of ``holder``."""
        with self._changed:
            for place in places:
                group = self._groups[place]
                for loan in [loan for loan, (who, _, _) in group.loans.items() if who is holder]:
                    _, message, redeliveries = group.loans.pop(loan)
                    group.ready.appendleft((message, redeliveries + 1))
            self._changed.notify_all()

    def _lend(self, places: Sequence[tuple[str, str]], holder: object, count_max: int) -> list[Delivery]:
        now_s = self._steady_s()
        taken: list[Delivery] = []
        for place in reversed(places):
            group = self._groups[place]
            while group.delayed and group.delayed[0][0] <= now_s:
                _, _, message, redeliveries = heapq.heappop(group.delayed)
                group.ready.append((message, redeliveries))
            while group.ready and len(taken) < count_max:
                message, redeliveries = group.ready.popleft()
                self._next_id += 1
                group.loans[self._next_id] = (holder, message, redeliveries)
                taken.append(Delivery(id=self._next_id, message=message, redeliveries=redeliveries))
        if taken:
            self._changed.notify_all()
        return taken

    def _next_due_s(self, places: Sequence[tuple[str, str]]) -> float:
        dues = [self._groups[place].delayed[0][0] for place in places if self._groups[place].delayed]
        return max(0.001, min(dues) - self._steady_s()) if dues else 3600.0

    @staticmethod
    def _waiting(group: _Group) -> int:
        return len(group.ready) + len(group.delayed)


class InProcessSubscription:
    """A consumer's place on ``InProcessTopics``."""

    def __init__(self, bus: InProcessTopics, places: Sequence[tuple[str, str]]) -> None:
        self._bus = bus
        self._places = places
        self._place_by_topic = {topic: (topic, group) for topic, group in places}

    def receive(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        """Return up to ``count_max`` messages; none when ``timeout_s`` passes or the bus is closed."""
        return self._bus.take(self._places, self, count_max=count_max, timeout_s=timeout_s)

    def acknowledge(self, delivery: Delivery) -> None:
        """End a message: its results are committed."""
        self._bus.give_back(self._place_by_topic[delivery.message.topic], delivery.id, delay_s=None)

    def negative(self, delivery: Delivery, *, delay_s: float) -> None:
        """Give a message back, to be delivered again after ``delay_s``."""
        self._bus.give_back(self._place_by_topic[delivery.message.topic], delivery.id, delay_s=delay_s)

    def close(self) -> None:
        """Leave; messages on loan go to the others."""
        self._bus.leave(self._places, self)
