"""The bus in memory: what every bus promises, and what only this one does."""

from __future__ import annotations

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.open import open_topics
from polyreme_datahub.topics.types import Message, Topics
from tests.contract.datahub.topics_contract import REDELIVERIES_MAX, REDELIVERY_S, TopicsContract


class Steps:
    """A steady clock that tests move."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def message(key: str, topic: str = "decode") -> Message:
    return Message(key=key, pipeline="p", topic=topic, body="{}")


@pytest.mark.slow
class TestInProcess(TopicsContract):
    @pytest.fixture
    def bus(self) -> Topics:
        return InProcessTopics(redelivery_s=REDELIVERY_S, redeliveries_max=REDELIVERIES_MAX)


def test_a_message_given_back_comes_again_after_its_delay() -> None:
    clock = Steps()
    bus = InProcessTopics(steady_s=clock)
    consumer = bus.subscribe(["decode"], group="g")
    bus.publish(message("a"), timeout_s=0)
    (delivery,) = consumer.receive(count_max=1, timeout_s=0)
    consumer.negative(delivery, delay_s=2.0)
    assert consumer.receive(count_max=1, timeout_s=0) == []
    clock.now_s = 2.5
    (again,) = consumer.receive(count_max=1, timeout_s=0)
    assert again.redeliveries == 1
    consumer.acknowledge(again)
    clock.now_s = 100.0
    assert consumer.receive(count_max=1, timeout_s=0) == []


def test_a_full_topic_makes_the_publisher_wait() -> None:
    bus: Topics = InProcessTopics(queue_max=2)
    consumer = bus.subscribe(["decode"], group="g")
    sent = [message("a"), message("b"), message("c")]
    assert bus.publish_all(sent, timeout_s=0) == sent[:2]
    assert not bus.publish(message("c"), timeout_s=0)
    consumer.receive(count_max=1, timeout_s=0)
    assert bus.publish(message("c"), timeout_s=0)


def test_later_stages_go_first() -> None:
    bus = InProcessTopics()
    consumer = bus.subscribe(["decode", "compose"], group="g")
    bus.publish(message("a", "decode"), timeout_s=0)
    bus.publish(message("b", "compose"), timeout_s=0)
    assert [d.message.key for d in consumer.receive(count_max=2, timeout_s=0)] == ["b", "a"]


@pytest.mark.parametrize(
    "url",
    [
        "",
        "memory",
        "kafka://host:9092",
        "pulsar://host",
        "pulsar:host:6650",
        "pulsar://host:6650/tenant",
        "pulsar://h:1?a",
    ],
)
def test_a_url_of_no_bus_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfigError, match=r"not topics: .*expected memory: or pulsar://host:port"):
        open_topics(url, environment={})


def test_an_ipv6_address_which_pulsars_client_does_not_take_is_refused_with_what_to_write() -> None:
    with pytest.raises(InvalidConfigError, match=r"Pulsar's client takes no IPv6 address; name a host"):
        open_topics("pulsar://[2001:db8::1]:6650/tenant/namespace")


def test_credentials_in_a_url_are_refused_and_not_repeated() -> None:
    with pytest.raises(InvalidConfigError, match=r"set POLYREME_TOPICS_TOKEN") as raised:
        open_topics("pulsar://user:hidden@host:6650", environment={})
    assert "hidden" not in str(raised.value)


def test_a_token_file_that_can_not_be_read_is_refused_by_name() -> None:
    with pytest.raises(InvalidConfigError, match=r"change POLYREME_TOPICS_TOKEN_FILE"):
        open_topics("pulsar://host:6650", environment={"POLYREME_TOPICS_TOKEN_FILE": "/nonexistent"})
    with pytest.raises(InvalidConfigError, match="both set"):
        open_topics("pulsar://host:1", environment={"POLYREME_TOPICS_TOKEN_FILE": "/x", "POLYREME_TOPICS_TOKEN": "t"})
