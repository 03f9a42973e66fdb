"""Runs messages to their end: publishes what is due, lets workers consume it, waits out what is away for a while.

A failed message comes again after a delay that doubles. Errors of the environment (store, registry, or a source's
files away) cost a message no try; a run ends with one when nothing succeeded for ``OUTAGES_MAX`` failures in a row.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from polyreme_api.errors import EnvironmentFailedError, PolyremeError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.operations.types import STAGES
from polyreme_datahub.registry import work
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work import StageCount
from polyreme_datahub.topics.memory import InProcessSubscription, InProcessTopics
from polyreme_datahub.topics.types import Delivery, Message

WORKERS = 2
DUE_MAX = 256
POLL_S = 0.2
PUBLISH_WAIT_S = 1.0
BACKOFF_S = 0.1
BACKOFF_MAX_S = 5.0
DUE_WAIT_MAX_S = 30.0
"""Longest wait for a due time that an earlier run noted: clocks may differ, and the earlier run is over."""
OUTAGES_MAX = 8
"""Failures of the environment in a row, over all workers, before a run ends: some 10 s, the adapters' tries apart."""
REDELIVERIES_MAX = 6
"""Unforeseen errors of one message in one run; from ``worker.TRIES_MAX`` on they cost single samples instead."""

Do = Callable[[Message], tuple[StageCount, Sequence[Message]]]
Counted = Callable[[Message, StageCount], None]


class Runner:
    """Workers over an in-process bus, for one run."""

    def __init__(
        self,
        database: Database,
        do: Do,
        *,
        counted: Counted,
        workers: int = WORKERS,
        now_s: Callable[[], float] = time.time,  # noqa: TID251 - the shell's default
        backoff_s: float = BACKOFF_S,
        topics: InProcessTopics | None = None,
    ) -> None:
        self._database = database
        self._do = do
        self._counted = counted
        self._workers = workers
        self._now_s = now_s
        self._backoff_s = backoff_s
        self._topics = topics or InProcessTopics()
        self._failure: BaseException | None = None
        self._outages = 0
        self._lock = threading.Lock()

    def run(self, messages: Sequence[Message]) -> None:
        """Put messages into the outbox, and do everything due of their pipelines, children included.

        Raises:
            EnvironmentFailedError: If store, registry or sources stay away; what was not done is still due.
            PolyremeError: The first other error that a worker met; what was not done is still due.
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
            dues_s = work.dues_of(self._database, [message.key for message in due])
            for message in due:
                wait_s = dues_s.get(message.key, 0.0) - self._now_s()
                self._publish(message, delay_s=min(max(0.0, wait_s), DUE_WAIT_MAX_S))
            while not self._topics.wait_idle(timeout_s=POLL_S):
                if self._failure is not None:
                    return

    def _publish(self, message: Message, *, delay_s: float) -> None:
        while self._failure is None:
            if self._topics.publish(message, timeout_s=PUBLISH_WAIT_S, delay_s=delay_s):
                return

    def _consume(self, subscription: InProcessSubscription) -> None:
        try:
            while self._failure is None:
                deliveries = subscription.receive(count_max=1, timeout_s=POLL_S)
                for delivery in deliveries:
                    self._take(subscription, delivery)
                if not deliveries and self._topics.closed:
                    return
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            with self._lock:
                self._failure = self._failure or error
        finally:
            subscription.close()

    def _take(self, subscription: InProcessSubscription, delivery: Delivery) -> None:
        message = delivery.message
        try:
            count, children = self._do(message)
        except Exception as error:  # noqa: BLE001 - raised again by _excuse when its tries are used up
            delay_s = self._excuse(delivery, error)
            subscription.negative(delivery, delay_s=delay_s)
            return
        with self._lock:
            self._outages = 0
        self._counted(message, count)
        # Handed over while the bytes are still in the cache. A full topic refuses: the child then comes by the outbox.
        for child in children:
            self._topics.publish(child, timeout_s=0)
        subscription.acknowledge(delivery)

    def _excuse(self, delivery: Delivery, error: Exception) -> float:
        """Note why a try failed, and return when the next one is due [seconds from now]; raise where there is none."""
        away = isinstance(error, EnvironmentFailedError) and not isinstance(error, IndexDamagedError)
        if isinstance(error, PolyremeError) and not away:
            self._note(delivery.message, error, counts=False, delay_s=0.0)
            raise error
        with self._lock:
            self._outages += away
            failures = self._outages if away else delivery.redeliveries + 1
        last = failures >= (OUTAGES_MAX if away else REDELIVERIES_MAX)
        delay_s = 0.0 if last else min(self._backoff_s * 2 ** (failures - 1), BACKOFF_MAX_S)
        self._note(delivery.message, error, counts=not away, delay_s=delay_s)
        if last:
            raise error
        return delay_s

    def _note(self, message: Message, error: Exception, *, counts: bool, delay_s: float) -> None:
        text = str(error) if isinstance(error, PolyremeError) else f"{type(error).__name__}: {error}"
        with contextlib.suppress(EnvironmentFailedError):
            work.end_try(self._database, message.key, counts=counts, due_s=self._now_s() + delay_s, error=text)


def version_of(message: Message) -> int:
    """Return the version that a message belongs to."""
    return int(message.key.split("/")[2])
