"""What every bus of topics promises; the same tests run on the one in memory and on a real Pulsar."""

from __future__ import annotations

import threading
import time
import uuid

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.topics.types import PAYLOAD_BYTES_MAX, Message, Subscription, Topics, dead_letters, encode

REDELIVERY_S = 0.2
REDELIVERIES_MAX = 2
PATIENCE_S = 20.0
"""Longest time that a delivery may take."""
QUIET_S = 1.0
"""Time in which nothing must come: several times ``REDELIVERY_S``."""


def keys(consumer: Subscription, count: int) -> list[str]:
    """Keys of the next messages, acknowledged."""
    found: list[str] = []
    until_s = time.monotonic() + PATIENCE_S
    while len(found) < count and time.monotonic() < until_s:
        for delivery in consumer.receive(count_max=count - len(found), timeout_s=0.2):
            found.append(delivery.message.key)
            consumer.acknowledge(delivery)
    return found


class TopicsContract:
    """Subclasses give ``bus``: one with the redeliveries above, whose topics and groups no other test names."""

    @pytest.fixture
    def bus(self) -> Topics:
        raise NotImplementedError

    @pytest.fixture(autouse=True)
    def names(self) -> None:
        unique = uuid.uuid4().hex
        self.topic, self.later_topic, self.group = f"decode-{unique}", f"compose-{unique}", f"g-{unique}"

    def message(self, key: str, *, body: str = "{}") -> Message:
        return Message(key=key, pipeline="p", topic=self.topic, body=body)

    def test_a_bus_that_answers_passes_the_check(self, bus: Topics) -> None:
        bus.check()
        bus.check()

    def test_a_message_is_lent_to_one_consumer_of_a_group_and_to_every_group(self, bus: Topics) -> None:
        one, two = (bus.subscribe([self.topic, self.later_topic], group=self.group) for _ in range(2))
        other = bus.subscribe([self.topic], group=f"{self.group}-other")
        sent = [self.message(f"k{number}") for number in range(10)]
        assert list(bus.publish_all(sent, timeout_s=PATIENCE_S)) == sent
        assert sorted(keys(other, 10)) == [f"k{number}" for number in range(10)]
        found: list[str] = []
        until_s = time.monotonic() + PATIENCE_S
        while len(found) < 10 and time.monotonic() < until_s:
            for consumer in (one, two):
                lent = consumer.receive(count_max=2, timeout_s=0.1)
                assert len(lent) <= 2
                assert all(delivery.message in sent for delivery in lent)
                found += [delivery.message.key for delivery in lent]
        assert sorted(found) == [f"k{number}" for number in range(10)]
        assert [*one.receive(count_max=1, timeout_s=QUIET_S), *two.receive(count_max=1, timeout_s=0.1)] == []

    def test_what_a_consumer_that_left_held_comes_again(self, bus: Topics) -> None:
        lost, other = bus.subscribe([self.topic], group=self.group), bus.subscribe([self.topic], group=self.group)
        sent = {f"k{number}" for number in range(6)}
        bus.publish_all([self.message(key) for key in sorted(sent)], timeout_s=PATIENCE_S)
        (delivery,) = lost.receive(count_max=1, timeout_s=PATIENCE_S)
        lost.close()
        found = set(keys(other, 6))
        assert delivery.message.key in found
        assert found == sent

    def test_a_message_comes_again_until_it_is_acknowledged(self, bus: Topics) -> None:
        consumer = bus.subscribe([self.topic], group=self.group)
        assert bus.publish(self.message("a"), timeout_s=PATIENCE_S)
        (delivery,) = consumer.receive(count_max=1, timeout_s=PATIENCE_S)
        assert consumer.receive(count_max=1, timeout_s=0.0) == []
        consumer.negative(delivery)
        (again,) = consumer.receive(count_max=1, timeout_s=PATIENCE_S)
        assert again.message == delivery.message
        consumer.acknowledge(again)
        assert consumer.receive(count_max=1, timeout_s=QUIET_S) == []

    def test_a_message_that_is_given_back_too_often_becomes_a_dead_letter(self, bus: Topics) -> None:
        consumer = bus.subscribe([self.topic, self.later_topic], group=self.group)
        dead = bus.subscribe([dead_letters(self.group)], group=self.group)
        bus.publish(self.message("a"), timeout_s=PATIENCE_S)
        for _ in range(1 + REDELIVERIES_MAX):
            (delivery,) = consumer.receive(count_max=1, timeout_s=PATIENCE_S)
            consumer.negative(delivery)
        (letter,) = self.letters(consumer, dead)
        assert letter == self.message("a")
        assert consumer.receive(count_max=1, timeout_s=QUIET_S) == []

    def letters(self, consumer: Subscription, dead: Subscription) -> list[Message]:
        """The dead letters; a client buries a message when it comes once more."""
        until_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < until_s:
            assert consumer.receive(count_max=1, timeout_s=REDELIVERY_S) == []
            if found := dead.receive(count_max=5, timeout_s=REDELIVERY_S):
                return [delivery.message for delivery in found]
        return []

    def test_the_longest_message_travels_and_a_longer_one_is_refused(self, bus: Topics) -> None:
        consumer = bus.subscribe([self.topic], group=self.group)
        room = PAYLOAD_BYTES_MAX - len(encode(self.message("a", body="")))
        longest = self.message("a", body="x" * room)
        assert bus.publish(longest, timeout_s=PATIENCE_S)
        (delivery,) = consumer.receive(count_max=1, timeout_s=PATIENCE_S)
        assert delivery.message == longest
        with pytest.raises(InvalidConfigError, match=f"has {PAYLOAD_BYTES_MAX + 1} bytes, at most {PAYLOAD_BYTES_MAX}"):
            bus.publish(self.message("a", body="x" * (room + 1)), timeout_s=0)

    @pytest.mark.parametrize("name", ["", "Decode", "a/b", "a b", "a-partition-0", "a" * 128])
    def test_a_name_that_is_no_topic_is_refused(self, bus: Topics, name: str) -> None:
        with pytest.raises(InvalidConfigError, match="not a topic"):
            bus.subscribe([name], group=self.group)
        with pytest.raises(InvalidConfigError, match="not a topic"):
            bus.publish(Message(key="a", pipeline="p", topic=name, body="{}"), timeout_s=0)

    def test_topics_are_opened_while_another_thread_sends(self, bus: Topics) -> None:
        sent = [self.message(f"k{number}") for number in range(200)]
        ended = threading.Event()
        opened: list[bool] = []

        def send() -> None:
            while not ended.is_set():
                bus.publish_all(sent, timeout_s=PATIENCE_S)

        def open_topics() -> None:
            for number in range(4):
                message = Message(key="a", pipeline="p", topic=f"{self.later_topic}-{number}", body="{}")
                opened.append(bus.publish(message, timeout_s=PATIENCE_S))

        threads = [threading.Thread(target=work, daemon=True) for work in (send, send, open_topics)]
        for thread in threads:
            thread.start()
        threads[2].join(PATIENCE_S)
        ended.set()
        for thread in threads:
            thread.join(PATIENCE_S)
        assert opened == [True] * 4

    def test_a_receiver_returns_when_the_bus_is_closed(self, bus: Topics) -> None:
        consumer = bus.subscribe([self.topic], group=self.group)
        received: list[object] = []
        thread = threading.Thread(
            target=lambda: received.append(consumer.receive(count_max=1, timeout_s=10 * PATIENCE_S))
        )
        thread.start()
        time.sleep(0.1)
        bus.close()
        thread.join(PATIENCE_S)
        assert received == [[]]
        assert consumer.receive(count_max=1, timeout_s=PATIENCE_S) == []
