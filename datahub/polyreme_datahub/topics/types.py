"""What a bus of topics promises: at-least-once delivery by key, acknowledgement, redelivery, back pressure.

Shaped after Pulsar's partitioned topics with key-shared subscriptions. No correctness may rest on the order of
delivery, and a message may come twice: its consumer commits by unique keys.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Protocol


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Ids of what is to be done."""

    key: str
    """Unique; orders delivery where a bus orders by key."""
    pipeline: str
    """Digest of the work that the message belongs to."""
    topic: str
    body: str
    """JSON, ids only."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Delivery:
    """A message on loan: acknowledge it, or give it back."""

    id: int
    message: Message
    redeliveries: int


class Subscription(Protocol):
    """A place in a group of consumers that share the messages of some topics."""

    def receive(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        """Return up to ``count_max`` messages; none when ``timeout_s`` passes or the bus is closed."""
        ...

    def acknowledge(self, delivery: Delivery) -> None:
        """End a message: its results are committed."""
        ...

    def negative(self, delivery: Delivery, *, delay_s: float) -> None:
        """Give a message back, to be delivered again after ``delay_s``."""
        ...

    def close(self) -> None:
        """Leave; messages on loan go to the others."""
        ...


class Topics(Protocol):
    """A bus."""

    def publish(self, message: Message, *, timeout_s: float, delay_s: float = 0.0) -> bool:
        """Send a message, to be delivered after ``delay_s``; False when the topic stayed full for ``timeout_s``."""
        ...

    def subscribe(self, topics: Sequence[str], *, group: str) -> Subscription:
        """Join a group of consumers."""
        ...
