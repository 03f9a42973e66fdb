"""The bus inside one process: bounded queues, loans, redelivery.

It keeps nothing on disk and need not: every due message is a row until its results are committed.
"""

from __future__ import annotations

import dataclasses
import heapq
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from polyreme_datahub.topics.types import (
    REDELIVERIES_MAX,
    REDELIVERY_S,
    Delivery,
    Message,
    checked_name,
    dead_letters,
    encode,
)

QUEUE_MAX = 256
"""Messages that wait in one topic before publishers wait."""

_Place = tuple[str, str]


@dataclasses.dataclass(slots=True)
class _Group:
    ready: deque[tuple[Message, int]] = dataclasses.field(default_factory=deque)
    delayed: list[tuple[float, int, Message, int]] = dataclasses.field(default_factory=list)

    @property
    def waiting(self) -> int:
        return len(self.ready) + len(self.delayed)


@dataclasses.dataclass(frozen=True, slots=True)
class _Loan:
    place: _Place
    holder: object
    message: Message
    redeliveries: int


class InProcessTopics:
    """Topics in memory."""

    def __init__(
        self,
        *,
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
        queue_max: int = QUEUE_MAX,
        redelivery_s: float = REDELIVERY_S,
        redeliveries_max: int = REDELIVERIES_MAX,
    ) -> None:
        self._steady_s = steady_s
        self._queue_max = queue_max
        self.redelivery_s, self._redeliveries_max = redelivery_s, redeliveries_max
        self._groups: dict[_Place, _Group] = {}
        self._loans: dict[int, _Loan] = {}
        self._changed = threading.Condition()
        self._next_id = 0
        self._closed = False

    def publish(self, message: Message, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        """Send a message to every group of its topic, to be delivered after ``delay_s``.

        Returns:
            False when a group stayed full for ``timeout_s``; then no group got the message.
        """
        encode(message)
        with self._changed:
            groups = [group for (topic, _), group in self._groups.items() if topic == message.topic]
            free = self._changed.wait_for(lambda: all(g.waiting < self._queue_max for g in groups), timeout_s)
            if not free:
                return False
            for group in groups:
                if delay_s > 0:
                    self._delay(group, message, delay_s, redeliveries=0)
                else:
                    group.ready.append((message, 0))
            self._changed.notify_all()
            return True

    def publish_all(self, messages: Sequence[Message], *, timeout_s: float) -> Sequence[Message]:
        """Send messages; return those that were taken within ``timeout_s``."""
        until_s = self._steady_s() + timeout_s
        return [
            message for message in messages if self.publish(message, timeout_s=max(0.0, until_s - self._steady_s()))
        ]

    def subscribe(self, topics: Sequence[str], *, group: str) -> InProcessSubscription:
        """Join a group of consumers; topics and groups are made as they are named."""
        places = [(checked_name(topic), checked_name(group)) for topic in topics]
        with self._changed:
            for place in places:
                self._groups.setdefault(place, _Group())
        return InProcessSubscription(self, places)

    @property
    def closed(self) -> bool:
        """Whether the bus was closed."""
        return self._closed

    def check(self) -> None:
        """Do nothing: it is in this process."""

    def close(self) -> None:
        """Wake every receiver; they get nothing more."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()

    def take(self, places: Sequence[_Place], holder: object, *, count_max: int, timeout_s: float) -> list[Delivery]:
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

    def give_back(self, loan: int, *, delay_s: float | None) -> None:
        """End a loan: for good, or (``delay_s``) to be lent again."""
        with self._changed:
            ended = self._loans.pop(loan, None)
            if ended is not None and delay_s is not None:
                if ended.redeliveries < self._redeliveries_max:
                    group = self._groups[ended.place]
                    self._delay(group, ended.message, delay_s, redeliveries=ended.redeliveries + 1)
                else:
                    self._move_to_dead_letters(ended)
            self._changed.notify_all()

    def leave(self, holder: object) -> None:
        """Take back every loan of ``holder``."""
        with self._changed:
            for id_, loan in [(id_, loan) for id_, loan in self._loans.items() if loan.holder is holder]:
                del self._loans[id_]
                self._groups[loan.place].ready.appendleft((loan.message, loan.redeliveries + 1))
            self._changed.notify_all()

    def _move_to_dead_letters(self, loan: _Loan) -> None:
        """Move a message to the topic for dead letters of its group, if a consumer reads that."""
        grave = dead_letters(loan.place[1])
        for (topic, _), group in self._groups.items():
            if topic == grave and group.waiting < self._queue_max:
                group.ready.append((loan.message, 0))

    def _delay(self, group: _Group, message: Message, delay_s: float, *, redeliveries: int) -> None:
        self._next_id += 1
        heapq.heappush(group.delayed, (self._steady_s() + delay_s, self._next_id, message, redeliveries))

    def _lend(self, places: Sequence[_Place], holder: object, count_max: int) -> list[Delivery]:
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
                self._loans[self._next_id] = _Loan(place, holder, message, redeliveries)
                taken.append(Delivery(id=self._next_id, message=message, redeliveries=redeliveries))
        if taken:
            self._changed.notify_all()
        return taken

    def _next_due_s(self, places: Sequence[_Place]) -> float:
        dues = [self._groups[place].delayed[0][0] for place in places if self._groups[place].delayed]
        return max(0.001, min(dues) - self._steady_s()) if dues else 3600.0


class InProcessSubscription:
    """A consumer's place on ``InProcessTopics``."""

    def __init__(self, bus: InProcessTopics, places: Sequence[_Place]) -> None:
        self._bus = bus
        self._places = places

    def receive(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        """Return up to ``count_max`` messages; none when ``timeout_s`` passes or the bus is closed."""
        return self._bus.take(self._places, self, count_max=count_max, timeout_s=timeout_s)

    def acknowledge(self, delivery: Delivery) -> None:
        """End a message: its results are committed."""
        self._bus.give_back(delivery.id, delay_s=None)

    def negative(self, delivery: Delivery, *, delay_s: float | None = None) -> None:
        """Give a message back, to be delivered again after ``delay_s``, or the time of the bus."""
        self._bus.give_back(delivery.id, delay_s=self._bus.redelivery_s if delay_s is None else delay_s)

    def close(self) -> None:
        """Leave; messages on loan go to the others."""
        self._bus.leave(self)
