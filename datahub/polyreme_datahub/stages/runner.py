"""Runs messages to their end: publishes what is due, lets workers consume it, stops at the first lost environment."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from polyreme_api.errors import PolyremeError
from polyreme_datahub.registry import work
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work import StageCount
from polyreme_datahub.stages.types import STAGES
from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.types import Delivery, Message, Subscription

WORKERS = 2
DUE_MAX = 256
POLL_S = 0.2
PUBLISH_WAIT_S = 1.0
REDELIVERY_DELAY_S = 0.1
FAILURES_MAX = 20
"""Unexpected errors of one run before it gives up; each chunk has its own bound too."""

Do = Callable[[Message], tuple[StageCount, Sequence[Message]]]
Counted = Callable[[Message, StageCount], None]


class Runner:
    """Workers over an in-process bus, for one run."""

    def __init__(self, database: Database, do: Do, *, counted: Counted, workers: int = WORKERS) -> None:
        self._database = database
        self._do = do
        self._counted = counted
        self._workers = workers
        self._topics = InProcessTopics()
        self._children: list[Message] = []
        self._failure: BaseException | None = None
        self._failures = 0
        self._changed = threading.Condition()

    def run(self, messages: Sequence[Message]) -> None:
        """Put messages into the outbox, and do everything due of their pipelines, children included.

        Raises:
            PolyremeError: The first that a worker met; what was not done is still due.
        """
        work.add_messages(self._database, messages)
        pipelines = sorted({message.pipeline for message in messages})
        threads = [
            threading.Thread(target=self._consume, args=(self._topics.subscribe(STAGES, group="workers"),), daemon=True)
            for _ in range(self._workers)
        ]
        for thread in threads:
            thread.start()
        try:
            for pipeline in pipelines:
                self._drain(pipeline)
        finally:
            self._topics.close()
            for thread in threads:
                thread.join()
        if self._failure is not None:
            raise self._failure

    def _drain(self, pipeline: str) -> None:
        while self._failure is None:
            due = work.due_messages(self._database, pipeline, count_max=DUE_MAX)
            if not due:
                return
            for message in due:
                self._publish(message)
            self._finish()

    def _publish(self, message: Message) -> None:
        while self._failure is None and not self._topics.publish(message, timeout_s=PUBLISH_WAIT_S):
            pass

    def _finish(self) -> None:
        """Publish what follows until nothing waits and nothing is on loan."""
        while self._failure is None:
            with self._changed:
                self._changed.wait_for(lambda: self._children or self._failure or self._topics.idle(), POLL_S)
                children, self._children = self._children, []
            for child in children:
                self._publish(child)
            if not children and self._topics.idle() and not self._children:
                return

    def _consume(self, subscription: Subscription) -> None:
        try:
            while self._failure is None:
                deliveries = subscription.receive(count_max=1, timeout_s=POLL_S)
                for delivery in deliveries:
                    self._take(subscription, delivery)
                if not deliveries and self._topics.closed:
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._fail(error)
        finally:
            subscription.close()

    def _take(self, subscription: Subscription, delivery: Delivery) -> None:
        message = delivery.message
        try:
            count, children = self._do(message)
        except PolyremeError as error:
            work.end_try(self._database, message.key, counts=False, due_s=0.0, error=str(error))
            raise
        except Exception as error:
            with self._changed:
                self._failures += 1
                if self._failures > FAILURES_MAX:
                    raise
            work.end_try(self._database, message.key, counts=True, due_s=0.0, error=f"{type(error).__name__}: {error}")
            subscription.negative(delivery, delay_s=REDELIVERY_DELAY_S)
            return
        self._counted(message, count)
        with self._changed:
            self._children += children
        subscription.acknowledge(delivery)
        with self._changed:
            self._changed.notify_all()

    def _fail(self, error: BaseException) -> None:
        with self._changed:
            if self._failure is None:
                self._failure = error
            self._changed.notify_all()


def version_of(message: Message) -> int:
    """Return the version that a message belongs to."""
    return int(message.key.split("/")[2])
