"""Topics on Pulsar: Shared subscriptions, one message an entry, and as few messages ahead of the work as it lets us.

A topic of ours is a topic of the namespace. The broker makes it at its first use, with as many partitions as it is
configured to. Messages are not batched: Pulsar would give a whole batch to one consumer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_datahub.topics.types import (
    REDELIVERIES_MAX,
    REDELIVERY_S,
    Delivery,
    Message,
    checked_name,
    dead_letters,
    decode,
    encode,
)

if TYPE_CHECKING:
    import pulsar

OPERATION_S_MAX = 10
"""Longest time of one subscription, producer or lookup, with the client's own retries."""
TRIES_MAX = 3
"""Tries of an operation that fails at once, within that time."""
RETRY_DELAY_S = 0.5
CONNECT_S_MAX = 5.0
SEND_S_MAX = 10.0
"""Longest time that a message waits for the broker before its send has failed."""
PENDING_MAX = 1000
"""Messages of one topic that wait for the broker's answer."""
LOOKED_UP = "check"
"""Topic that a check looks up; nothing is ever sent to it."""
AHEAD_MAX = 1
"""Messages of one partition that a consumer holds before it is asked for them: the others' idle time."""

_FULL = frozenset({"ProducerQueueIsFull", "ProducerBlockedQuotaExceededError", "ProducerBlockedQuotaExceededException"})
"""Results of a send that the bus can't take now."""

_HINTS = {
    "AuthenticationError": "the broker refuses the token: set POLYREME_TOPICS_TOKEN or POLYREME_TOPICS_TOKEN_FILE",
    "AuthorizationError": "the token does not permit to send and receive in this namespace",
    "ConnectError": "no broker there, no host of that name, or a certificate of an authority that is not in "
    "POLYREME_TOPICS_CA_FILE",
    "TimeOut": "no broker answered in time",
    "TopicNotFound": "no such namespace, or the broker makes no topics at their first use",
}
"""What the client's words mean here."""

_Result = TypeVar("_Result")


class _Send:
    """A message on its way to the broker."""

    def __init__(self) -> None:
        self.ended = threading.Event()
        self.is_stored = False
        self.failure = ""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PulsarSettings:
    """Where the broker is, and how long it may take."""

    url: str
    """``pulsar://host:port`` or ``pulsar+ssl://host:port``."""
    namespace: str
    """``tenant/namespace``."""
    token: Callable[[], str] | None = None
    """Returns the token of each connection; None where the broker asks for none."""
    authorities: str | None = None
    """File of the certificates of authorities; None for those that Python trusts."""
    redelivery_s: float = REDELIVERY_S
    """Time until a message that was given back comes again [s]."""
    redeliveries_max: int = REDELIVERIES_MAX
    """Times that it comes again."""
    operation_s: int = OPERATION_S_MAX
    """Longest time until a broker that can't be reached is reported [s]."""


class PulsarTopics:
    """Topics on a Pulsar cluster. It connects at the first use, and again by itself.

    Args:
        settings: The broker.
        steady_s: A clock that never jumps [s].
        sleep: Waits between tries.

    Raises:
        InvalidConfigError: If the client library is missing.
    """

    def __init__(
        self,
        settings: PulsarSettings,
        *,
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
        sleep: Callable[[float], None] = time.sleep,  # noqa: TID251 - the shell's default
    ) -> None:
        try:
            import pulsar
        except ImportError as error:
            raise InvalidConfigError(
                f"topics at {settings.url} need the package pulsar-client: install polyreme[services]",
                field="POLYREME_TOPICS_URL",
            ) from error
        self._settings, self._steady_s, self._sleep = settings, steady_s, sleep
        self._client = pulsar.Client(
            settings.url,
            authentication=pulsar.AuthenticationToken(settings.token) if settings.token else None,
            operation_timeout_seconds=settings.operation_s,
            connection_timeout_ms=int(CONNECT_S_MAX * 1000),
            stats_interval_in_seconds=0,
            tls_trust_certs_file_path=settings.authorities,
            tls_validate_hostname=True,
            # What it would print on standard output is in the errors that we raise.
            logger=pulsar.FileLogger(pulsar.LoggerLevel.Error, os.devnull),
        )
        self._closed = threading.Event()
        # Never held while we wait for the client: its one thread takes it for each message that was stored.
        self._lock = threading.Lock()
        self._opening = threading.Lock()
        self._producers: dict[str, pulsar.Producer] = {}
        self._sends: dict[Message, _Send] = {}

    def publish(self, message: Message, *, timeout_s: float) -> bool:
        """Send a message; return whether the broker stored it within ``timeout_s``."""
        return bool(self.publish_all([message], timeout_s=timeout_s))

    def publish_all(self, messages: Sequence[Message], *, timeout_s: float) -> Sequence[Message]:
        """Send messages; return those that the broker stored within ``timeout_s``."""
        until_s = self._steady_s() + timeout_s
        sends = [self._send(message) for message in messages]
        for send in sends:
            send.ended.wait(max(0.0, until_s - self._steady_s()))
        taken = [message for message, send in zip(messages, sends, strict=True) if send.is_stored]
        reasons = [send.failure for send in sends if send.failure]
        if messages and not taken and (reasons or not all(self._is_connected(message.topic) for message in messages)):
            reason = reasons[0] if reasons else "not connected"
            raise self._failed(f"sending to {messages[0].topic} failed within {timeout_s} s", reason)
        return taken

    def subscribe(self, topics: Sequence[str], *, group: str) -> PulsarSubscription:
        """Join a Shared subscription over some topics; they are made as they are named."""
        import pulsar

        names = [self._topic(topic) for topic in topics]
        policy = pulsar.ConsumerDeadLetterPolicy(
            self._settings.redeliveries_max, self._topic(dead_letters(group)), group
        )
        consumer = self._try(
            f"subscribing to {', '.join(topics)}",
            lambda: self._client.subscribe(
                names,
                checked_name(group),
                consumer_type=pulsar.ConsumerType.Shared,
                # Keys that were sent before the first worker came are work all the same.
                initial_position=pulsar.InitialPosition.Earliest,
                receiver_queue_size=AHEAD_MAX,
                negative_ack_redelivery_delay_ms=int(self._settings.redelivery_s * 1000),
                dead_letter_policy=policy,
            ),
        )
        return PulsarSubscription(consumer, self._closed, lambda reason: self._failed(f"receiving of {group}", reason))

    def check(self) -> None:
        """Look a topic up, which takes a connection and the token."""
        self._try("looking a topic up", lambda: self._client.get_topic_partitions(self._topic(LOOKED_UP)))

    def close(self) -> None:
        """Close every producer and consumer; what was not acknowledged goes to others."""
        import pulsar

        self._closed.set()
        with contextlib.suppress(pulsar.PulsarException):
            self._client.close()

    def _send(self, message: Message) -> _Send:
        """Send a message, or return the send of the same one that is under way: it is no news to anyone."""
        payload = encode(message)
        producer = self._producer(message.topic)
        with self._lock:
            if (send := self._sends.get(message)) is not None:
                return send
            send = self._sends[message] = _Send()
        try:
            producer.send_async(payload, lambda result, _: self._end(message, send, result.name))
        except Exception as error:  # noqa: BLE001 - every error of the client, whatever class it gives it
            self._end(message, send, str(error))
        return send

    def _end(self, message: Message, send: _Send, result: str) -> None:
        with self._lock:
            self._sends.pop(message, None)
        send.is_stored = result == "Ok"
        send.failure = "" if result in {"Ok", *_FULL} else result
        send.ended.set()

    def _producer(self, topic: str) -> pulsar.Producer:
        with self._opening:
            if topic not in self._producers:
                self._producers[topic] = self._try(
                    f"opening the topic {topic}",
                    lambda: self._client.create_producer(
                        self._topic(topic),
                        send_timeout_millis=int(SEND_S_MAX * 1000),
                        max_pending_messages=PENDING_MAX,
                    ),
                )
            return self._producers[topic]

    def _is_connected(self, topic: str) -> bool:
        return bool(self._producer(topic).is_connected())

    def _topic(self, name: str) -> str:
        return f"persistent://{self._settings.namespace}/{checked_name(name)}"

    def _try(self, what: str, call: Callable[[], _Result]) -> _Result:
        import pulsar

        until_s = self._steady_s() + self._settings.operation_s
        for tried in range(1, TRIES_MAX + 1):
            try:
                return call()
            except pulsar.PulsarException as error:
                refused = isinstance(error, (pulsar.AuthenticationError, pulsar.AuthorizationError))
                if tried == TRIES_MAX or refused or self._steady_s() >= until_s:
                    raise self._failed(f"{what} failed", str(error)) from error
                self._sleep(RETRY_DELAY_S)
        raise AssertionError("the last try returns or raises")

    def _failed(self, what: str, reason: str) -> EnvironmentFailedError:
        word = reason.removeprefix("Pulsar error: ")
        text = f"{_HINTS[word]} ({word})" if word in _HINTS else word
        return EnvironmentFailedError(f"topics at {self._settings.url}/{self._settings.namespace}: {what}: {text}")


class PulsarSubscription:
    """A consumer of a Shared subscription.

    Args:
        consumer: The client's.
        bus_closed: Set when the bus is closed.
        failed: Makes the error of a consumer that the broker refuses.
    """

    def __init__(
        self,
        consumer: pulsar.Consumer,
        bus_closed: threading.Event,
        failed: Callable[[str], EnvironmentFailedError],
    ) -> None:
        self._consumer, self._bus_closed, self._failed = consumer, bus_closed, failed
        self._loans: dict[int, pulsar.Message] = {}
        self._next_id = 0
        self._closed = threading.Event()

    def receive(self, *, count_max: int, timeout_s: float) -> Sequence[Delivery]:
        """Return up to ``count_max`` messages, as soon as there is one; none after ``timeout_s`` or a close."""
        import pulsar

        deliveries: list[Delivery] = []
        wait_ms = int(timeout_s * 1000)
        while len(deliveries) < count_max:
            try:
                received = self._consumer.receive(wait_ms)
            except pulsar.Timeout:
                break
            except pulsar.PulsarException as error:
                if self._closed.is_set() or self._bus_closed.is_set():
                    break
                raise self._failed(str(error)) from error
            message = decode(received.data())
            if message is None:
                # Not ours: after its last redelivery it is a dead letter.
                self._consumer.negative_acknowledge(received)
                continue
            self._next_id += 1
            self._loans[self._next_id] = received
            deliveries.append(
                Delivery(id=self._next_id, message=message, redeliveries=int(received.redelivery_count()))
            )
            wait_ms = 0
        return deliveries

    def acknowledge(self, delivery: Delivery) -> None:
        """End a message: its results are committed."""
        self._end(delivery, self._consumer.acknowledge)

    def negative(self, delivery: Delivery) -> None:
        """Give a message back, to come again after ``REDELIVERY_S``."""
        self._end(delivery, self._consumer.negative_acknowledge)

    def close(self) -> None:
        """Leave; messages on loan, and those ahead, go to the others."""
        import pulsar

        self._closed.set()
        with contextlib.suppress(pulsar.PulsarException):
            self._consumer.close()

    def _end(self, delivery: Delivery, end: Callable[[pulsar.Message], None]) -> None:
        """What the broker does not hear comes again."""
        import pulsar

        received = self._loans.pop(delivery.id, None)
        if received is not None:
            with contextlib.suppress(pulsar.PulsarException):
                end(received)
