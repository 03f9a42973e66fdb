"""A pool of worker threads over a bus: takes keys, leases items, does them, and waits out what is away for a while.

Errors of the environment (store, registry, source) cost an item no try; a pool gives up when nothing succeeded for
``OUTAGES_MAX`` failures in a row.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from polyreme_api.errors import EnvironmentFailedError, PolyremeError, RetryableError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.registry.work_items import Claimed, WorkItem
from polyreme_datahub.runner.leases import Leases
from polyreme_datahub.runner.publisher import Publisher
from polyreme_datahub.topics.types import Delivery, Subscription, Topics

POLL_S = 0.2
LOOKS_MAX = 25
"""Default of ``looks_max``: a count over a large flow takes time."""
GROUP = "workers"
BACKOFF_S = 0.1
BACKOFF_MAX_S = 5.0
OUTAGES_MAX = 8
"""Failures of the environment in a row, over all workers, before the pool gives up: some 10 s, retries apart."""
TRIES_MAX = 6
"""Tries of one item that our own code failed."""


OnItem = Callable[[WorkItem, float, bool], None]
"""Takes an item, the time that a try of it took [s], and whether it is done."""


class Handler(Protocol):
    """Does items; one object for each thread."""

    def do(self, item: WorkItem) -> None:
        """Do an item to its end."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class Pool:
    """Workers of one process.

    Args:
        database: Registry.
        topics: The bus.
        stages: Names of the stages whose items are done here, in their order.
        handler: Makes the handler of one thread.
        flow: The flow whose items are published here; None: every flow.
        workers: Threads.
        owner: Name of this process.
        now_s: Wall clock [s].
        backoff_s: Wait after the first failure [s].
        steady_s: A clock that never jumps [s].
        on_item: Called after each try of an item, from worker threads.
        looks_max: Waits of ``POLL_S`` or less while workers are busy, before ``done`` is asked all the same.
    """

    def __init__(
        self,
        database: Database,
        topics: Topics,
        *,
        stages: Sequence[str],
        handler: Callable[[], Handler],
        flow: str | None,
        workers: int,
        owner: str,
        now_s: Callable[[], float],
        backoff_s: float = BACKOFF_S,
        steady_s: Callable[[], float] = time.monotonic,  # noqa: TID251 - the shell's default
        on_item: OnItem | None = None,
        looks_max: int = LOOKS_MAX,
    ) -> None:
        self._looks_max = looks_max
        self._handler = handler
        self._flow, self._stages = flow, tuple(reversed(stages))
        self._now_s, self._backoff_s = now_s, backoff_s
        self._steady_s, self._on_item = steady_s, on_item
        self._leases = Leases(database, owner, now_s=now_s)
        self.publisher = Publisher(database, topics, stages, now_s=now_s, flow=flow)
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._outages = 0
        self._busy = 0
        self._threads = [threading.Thread(target=self._guarded, args=(self._publish,), daemon=True)]
        for _ in range(workers):
            subscription = topics.subscribe(tuple(stages), group=GROUP)
            self._threads.append(threading.Thread(target=self._guarded, args=(self._work, subscription), daemon=True))

    def run_until(self, done: Callable[[], bool]) -> None:
        """Work until ``done``, which is asked when no worker is busy, and now and then.

        Raises:
            EnvironmentFailedError: If store, registry or sources stay away; what was not done is still due.
            PolyremeError: The first other error that a worker met; what was not done is still due.
        """
        for thread in self._threads:
            thread.start()
        try:
            while not self._stopped.is_set() and not done():
                self._wait()
        finally:
            self._stopped.set()
            self.publisher.wake()
            for thread in self._threads:
                thread.join()
            with contextlib.suppress(EnvironmentFailedError):
                self._leases.close()
        if self._failure is not None:
            raise self._failure

    def _wait(self) -> None:
        """Wait until no worker is busy, or for a while."""
        for _ in range(self._looks_max):
            with self._changed:
                self._changed.wait(POLL_S)
                if self._stopped.is_set() or not self._busy:
                    return

    def _guarded(self, body: Callable[..., None], *arguments: Subscription) -> None:
        try:
            body(*arguments)
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._stopped.set()
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _publish(self) -> None:
        while not self._stopped.is_set():
            try:
                self.publisher.run(self._stopped)
            except EnvironmentFailedError as error:
                self._stopped.wait(self._outage(error))

    def _work(self, subscription: Subscription) -> None:
        handler = self._handler()
        try:
            while not self._stopped.is_set():
                deliveries = subscription.receive(count_max=1, timeout_s=POLL_S)
                for delivery in deliveries:
                    self._take(handler, subscription, delivery)
                if not deliveries:
                    self._take_any(handler)
        finally:
            handler.close()
            subscription.close()

    def _take(self, handler: Handler, subscription: Subscription, delivery: Delivery) -> None:
        """Do the item of one delivery. The row keeps what is due: the publisher sends it again after a failure."""
        key = delivery.message.key
        if self._do(handler, lambda: self._leases.claim(key)):
            subscription.acknowledge(delivery)
        else:
            subscription.negative(delivery)

    def _take_any(self, handler: Handler) -> None:
        """Do an item that no topic brought: its message was lost, the bus is away, or another worker has too many."""
        self._do(handler, lambda: self._leases.claim_any(self._flow, self._stages))

    def _do(self, handler: Handler, claim: Callable[[], Claimed | None]) -> bool:
        """Claim an item and do it; return False if the registry was away, so that nothing is noted."""
        claimed: Claimed | None = None
        with self._working():
            try:
                claimed = claim()
                if claimed is None:
                    return True
                self._handle(handler, claimed.item)
                self._leases.forget(claimed.item.key)
                self._outages = 0
            except Exception as error:  # noqa: BLE001 - raised again when the tries are used up
                delay_s = self._failed(claimed, error)
                if claimed is None:
                    self._stopped.wait(delay_s)
                    return False
        self.publisher.wake()
        return True

    def _handle(self, handler: Handler, item: WorkItem) -> None:
        begun_s, done = self._steady_s(), False
        try:
            handler.do(item)
            done = True
        finally:
            if self._on_item is not None:
                self._on_item(item, self._steady_s() - begun_s, done)

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        with self._changed:
            self._busy += 1
        try:
            yield
        finally:
            with self._changed:
                self._busy -= 1
                self._changed.notify_all()

    def _failed(self, claimed: Claimed | None, error: Exception) -> float:
        """Give an item back until it is due again [s from now]; raise where there is no further try."""
        away = isinstance(error, (EnvironmentFailedError, RetryableError)) and not isinstance(error, IndexDamagedError)
        ours = not isinstance(error, PolyremeError)
        delay_s = 0.0
        last = not away and not ours
        if away:
            delay_s = self._outage(error)
        elif ours:
            tries = claimed.tries if claimed is not None else TRIES_MAX
            last = tries >= TRIES_MAX
            delay_s = self._delay_s(tries)
        if claimed is not None:
            text = f"{type(error).__name__}: {error}" if ours else str(error)
            with contextlib.suppress(EnvironmentFailedError):
                due_s = self._now_s() + delay_s
                self._leases.release(claimed.item.key, due_s=due_s, error=text, counts_try=ours)
        if last:
            raise error
        return delay_s

    def _outage(self, error: Exception) -> float:
        """Count a failure of the environment; return how long to wait [s]; raise it where nothing succeeds."""
        self._outages += 1
        if self._outages >= OUTAGES_MAX:
            raise error
        return self._delay_s(self._outages)

    def _delay_s(self, failures: int) -> float:
        return float(min(self._backoff_s * 2.0 ** (failures - 1), BACKOFF_MAX_S))
