"""A bus of topics: at-least-once delivery of keys to groups of consumers, acknowledgement, redelivery, back pressure.

A message is a hint that a row has work; the row is the truth. Every adapter keeps these rules and no others:

- A message that the bus took reaches every group of its topic that existed by then, at least once, and comes again
  until it is acknowledged; also after a restart of the bus, if the bus is a server.
- No order. No exact time: a message that was given back comes again after about ``REDELIVERY_S``. Work that is due
  later is not sent before; its row knows when.
- Counts of redeliveries are lower bounds: a restart of the bus or of a consumer may forget them.
- A message that was given back ``REDELIVERIES_MAX`` times goes to the topic ``dead_letters(group)`` and comes no more.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Sequence
from typing import Protocol

from polyreme_api.errors import InvalidConfigError

PAYLOAD_BYTES_MAX = 4096
"""Longest message: a key and a few ids; what they mean is in rows."""
REDELIVERY_S = 1.0
REDELIVERIES_MAX = 16
TOPIC = re.compile(r"[a-z][a-z0-9.-]{0,126}")
"""Names of topics and groups; a step's name is one, and holds no dot."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """Ids of what is to be done."""

    key: str
    """Key of the row that has work."""
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
    """How often it was lent before, as far as the bus knows."""


class Subscription(Protocol):
    """A place in a group of consumers that share the messages of some topics. For one thread at a time."""

    def receive(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        """Return up to ``count_max`` messages, as soon as there is one; none after ``timeout_s`` or a close.

        A bus that can't be reached is waited for in the same way: nothing comes meanwhile.
        """
        ...

    def acknowledge(self, delivery: Delivery) -> None:
        """End a message; one whose acknowledgement is lost comes again."""
        ...

    def negative(self, delivery: Delivery) -> None:
        """Give a message back: it comes again after ``REDELIVERY_S``, to any consumer of the group."""
        ...

    def close(self) -> None:
        """Leave; messages on loan go to the others."""
        ...


class Topics(Protocol):
    """A bus."""

    def publish(self, message: Message, *, timeout_s: float) -> bool:
        """Send a message.

        Returns:
            Whether the bus took it within ``timeout_s``. If not (a topic is full, or the bus is slow) it may still be
            delivered.

        Raises:
            EnvironmentFailedError: If the bus can't be reached.
            InvalidConfigError: If the message is longer than ``PAYLOAD_BYTES_MAX``.
        """
        ...

    def publish_all(self, messages: Sequence[Message], *, timeout_s: float) -> Sequence[Message]:
        """Send messages at once; return those that the bus took within ``timeout_s``. Raises as ``publish``."""
        ...

    def subscribe(self, topics: Sequence[str], *, group: str) -> Subscription:
        """Join a group of consumers; topics and groups are made as they are named.

        Raises:
            EnvironmentFailedError: If the bus can't be reached.
            InvalidConfigError: If a name is none.
        """
        ...

    def check(self) -> None:
        """Ask the bus whether it answers.

        Raises:
            EnvironmentFailedError: If it can't be reached, or refuses.
        """
        ...

    def close(self) -> None:
        """Let every receiver return; nothing is sent or received any more."""
        ...


def dead_letters(group: str) -> str:
    """Name of the topic of the messages that a group gave back too often."""
    return f"{group}.dead-letters"


def checked_name(name: str) -> str:
    """Return the name of a topic or group.

    Raises:
        InvalidConfigError: If it is none.
    """
    if not TOPIC.fullmatch(name) or re.search(r"-partition-\d+$", name):
        raise InvalidConfigError(
            f"not a topic: {name!r}, names have 1 to 127 lower-case letters, digits, '-' and '.', begin with a letter, "
            "and don't end like '-partition-0'"
        )
    return name


def encode(message: Message) -> bytes:
    """Return the bytes that travel.

    Raises:
        InvalidConfigError: If they are too many, or the topic's name is none.
    """
    checked_name(message.topic)
    payload = json.dumps(dataclasses.asdict(message), separators=(",", ":")).encode()
    if len(payload) > PAYLOAD_BYTES_MAX:
        raise InvalidConfigError(
            f"message {message.key[:64]} has {len(payload)} bytes, at most {PAYLOAD_BYTES_MAX}: a message carries a "
            "key, and its row the rest"
        )
    return payload


def decode(payload: bytes) -> Message | None:
    """Return the message of some bytes; None when they are none."""
    try:
        fields = json.loads(payload)
        message = Message(**fields)
    except (ValueError, TypeError):
        return None
    return message if all(isinstance(value, str) for value in fields.values()) else None
