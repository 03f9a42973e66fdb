"""What a bus of topics promises: at least once, by loan, with redelivery and back pressure."""

from __future__ import annotations

from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.types import Message, Topics


class Steps:
    """A steady clock that tests move."""

    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def message(key: str, topic: str = "decode") -> Message:
    return Message(key=key, pipeline="p", topic=topic, body="{}")


def test_a_message_is_lent_to_one_consumer_of_a_group_and_to_every_group() -> None:
    bus = InProcessTopics()
    one, two = bus.subscribe(["decode"], group="g"), bus.subscribe(["decode"], group="g")
    other = bus.subscribe(["decode"], group="h")
    assert bus.publish(message("a"), timeout_s=0)
    assert [d.message.key for d in one.receive(count_max=5, timeout_s=0)] == ["a"]
    assert two.receive(count_max=5, timeout_s=0) == []
    assert [d.message.key for d in other.receive(count_max=5, timeout_s=0)] == ["a"]


def test_what_a_lost_consumer_held_comes_again() -> None:
    bus = InProcessTopics()
    lost, other = bus.subscribe(["decode"], group="g"), bus.subscribe(["decode"], group="g")
    bus.publish(message("a"), timeout_s=0)
    lost.receive(count_max=1, timeout_s=0)
    lost.close()
    (again,) = other.receive(count_max=1, timeout_s=0)
    assert (again.message.key, again.redeliveries) == ("a", 1)


def test_a_message_given_back_comes_again_after_its_delay() -> None:
    clock = Steps()
    bus = InProcessTopics(steady_s=clock)
    consumer = bus.subscribe(["decode"], group="g")
    bus.publish(message("a"), timeout_s=0)
    (delivery,) = consumer.receive(count_max=1, timeout_s=0)
    consumer.negative(delivery, delay_s=2.0)
    assert consumer.receive(count_max=1, timeout_s=0) == []
    assert not bus.wait_idle(timeout_s=0)
    clock.now_s = 2.5
    (again,) = consumer.receive(count_max=1, timeout_s=0)
    assert again.redeliveries == 1
    consumer.acknowledge(again)
    assert bus.wait_idle(timeout_s=0)


def test_a_full_topic_makes_the_publisher_wait() -> None:
    bus: Topics = InProcessTopics(queue_max=2)
    consumer = bus.subscribe(["decode"], group="g")
    assert bus.publish(message("a"), timeout_s=0)
    assert bus.publish(message("b"), timeout_s=0)
    assert not bus.publish(message("c"), timeout_s=0)
    consumer.receive(count_max=1, timeout_s=0)
    assert bus.publish(message("c"), timeout_s=0)


def test_later_stages_go_first() -> None:
    bus = InProcessTopics()
    consumer = bus.subscribe(["decode", "compose"], group="g")
    bus.publish(message("a", "decode"), timeout_s=0)
    bus.publish(message("b", "compose"), timeout_s=0)
    assert [d.message.key for d in consumer.receive(count_max=2, timeout_s=0)] == ["b", "a"]
