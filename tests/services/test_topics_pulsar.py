"""Topics on a real Pulsar: what every bus promises, and what is so after the broker was killed."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.topics.open import open_topics
from polyreme_datahub.topics.pulsar import PulsarSettings, PulsarTopics
from polyreme_datahub.topics.types import Message, Topics, dead_letters
from tests.contract.datahub.topics_contract import PATIENCE_S, REDELIVERIES_MAX, REDELIVERY_S, TopicsContract
from tools.services.guard import held
from tools.services.pulsar import Pulsar

pytestmark = [pytest.mark.services, pytest.mark.slow]

MESSAGES = 300
WAITING = 200
"""Messages that the broker had when it was killed."""
LENT = 20
OUTAGE_S_MAX = 300.0
"""The client waits up to twice as long as the broker was away."""


class TestPulsar(TopicsContract):
    @pytest.fixture
    def bus(self, pulsar_server: str) -> Iterator[Topics]:
        bus = PulsarTopics(
            PulsarSettings(
                url=pulsar_server,
                namespace="public/default",
                redelivery_s=REDELIVERY_S,
                redeliveries_max=REDELIVERIES_MAX,
            )
        )
        yield bus
        bus.close()

    def test_bytes_that_are_no_message_become_a_dead_letter_and_hold_up_nothing(
        self, bus: Topics, pulsar_server: str
    ) -> None:
        import pulsar

        consumer = bus.subscribe([self.topic], group=self.group)
        client = pulsar.Client(pulsar_server)
        client.create_producer(f"persistent://public/default/{self.topic}").send(b"\xff not ours")
        bus.publish(self.message("a"), timeout_s=PATIENCE_S)
        letters = client.subscribe(f"persistent://public/default/{dead_letters(self.group)}", self.group)
        found: list[Message] = []
        raw: list[bytes] = []
        until_s = time.monotonic() + PATIENCE_S
        while not raw and time.monotonic() < until_s:
            found += [delivery.message for delivery in consumer.receive(count_max=5, timeout_s=REDELIVERY_S)]
            with contextlib.suppress(pulsar.Timeout):
                raw.append(letters.receive(100).data())
        client.close()
        assert raw == [b"\xff not ours"]
        assert found == [self.message("a")]


def test_a_broker_that_is_nowhere_is_an_error_of_the_environment() -> None:
    bus = PulsarTopics(PulsarSettings(url="pulsar://127.0.0.1:1", namespace="a/b", operation_s=1))
    with pytest.raises(EnvironmentFailedError, match=r"topics at pulsar://127.0.0.1:1/a/b: opening the topic decode"):
        bus.publish(message("a"), timeout_s=1.0)
    with pytest.raises(EnvironmentFailedError, match=r"subscribing to decode failed: no broker answered"):
        bus.subscribe(["decode"], group="workers")
    bus.close()


def test_a_namespace_that_does_not_exist_is_named(pulsar_server: str) -> None:
    bus = open_topics(f"{pulsar_server}/no/such", environment={})
    with pytest.raises(EnvironmentFailedError, match=r"/no/such: subscribing to decode failed: no such namespace"):
        bus.subscribe(["decode"], group="workers")
    bus.close()


@pytest.mark.timeout(600)
def test_every_message_is_delivered_though_the_broker_is_killed(tmp_path: Path) -> None:
    """Those on loan, those that waited, and those that are sent meanwhile."""
    with held(tmp_path) as servers:
        broker = Pulsar(tmp_path, servers)
        broker.start()
        bus = open_topics(broker.wait()["POLYREME_TOPICS_URL"], environment={})
        consumer = bus.subscribe(["decode"], group="workers")
        sent = [message(f"k{number:03}") for number in range(MESSAGES)]
        assert len(bus.publish_all(sent[:WAITING], timeout_s=PATIENCE_S)) == WAITING
        lent = consumer.receive(count_max=LENT, timeout_s=PATIENCE_S)
        outages: list[EnvironmentFailedError] = []
        publisher = threading.Thread(target=publish_until_taken, args=(bus, sent[WAITING:], outages))
        psutil.Process(servers.all[0].pid).kill()
        publisher.start()
        until_s = time.monotonic() + OUTAGE_S_MAX
        while not outages and time.monotonic() < until_s:
            assert consumer.receive(count_max=10, timeout_s=0.2) is not None
        broker.start()
        broker.wait()
        missing = set(sent)
        while missing and time.monotonic() < until_s:
            for delivery in consumer.receive(count_max=10, timeout_s=0.2):
                missing.discard(delivery.message)
                consumer.acknowledge(delivery)
        assert missing == set()
        publisher.join(PATIENCE_S)
        assert not publisher.is_alive()
        bus.close()
    assert len(lent) > 0
    assert "sending to decode failed within" in str(outages[0])


def message(key: str) -> Message:
    return Message(key=key, pipeline="p", topic="decode", body="{}")


def publish_until_taken(bus: Topics, messages: list[Message], outages: list[EnvironmentFailedError]) -> None:
    """Send messages until the bus took each, in small batches."""
    left = messages
    while left:
        try:
            taken = set(bus.publish_all(left[:10], timeout_s=2.0))
        except EnvironmentFailedError as error:
            outages.append(error)
            continue
        left = [message for message in left if message not in taken]
