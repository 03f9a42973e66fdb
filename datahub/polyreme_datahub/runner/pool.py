"""A pool of worker threads over a bus: takes keys, leases items, does them, and waits out what is away for a while.

Errors of the environment (store, registry, source) cost an item no try; a pool gives up when nothing has succeeded for
a minute (``OUTAGE_BACKOFFS``). A bus that is away is waited for without an end: workers find items in the registry.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from polyreme_api.errors import EnvironmentFailedError, PolyremeError, RetryableError
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.registry.work_items import Claimed, WorkItem
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.leases import Leases
from polyreme_datahub.runner.publisher import Publisher
from polyreme_datahub.topics.memory import InProcessTopics
from polyreme_datahub.topics.types import Delivery, Subscription

POLL_S = 0.2
LOOKS_MAX = 25
"""Default of ``looks_max``: a count over a large flow takes time."""
GROUP = "workers"
BACKOFF_MAX_S = 5.0
AWAY_WORK_RATIO = 3
"""Least time of work between two tries to subscribe to a bus that is away, over the time of a try, which may block."""
OUTAGES_MAX = 8
"""Failures of the environment in a row before the pool may give up."""
OUTAGE_BACKOFFS = 600
"""Least time from the first of them until it does, in first waits: 60 s. Many workers fail at once."""
TRIES_MAX = 6
"""Tries of one item that our own code failed."""

_log = logging.getLogger(__name__)


class Handler(Protocol):
    """Does items; one object for each thread."""

    def do(self, item: WorkItem) -> None:
        """Do an item to its end."""
        ...

    def close(self) -> None:
        """End what it started."""
        ...


class Outage:
    """Failures in a row of something that all threads use.

    Args:
        backoff_s: Wait after the first one [s].
        steady_s: A clock that never jumps [s].
    """

    def __init__(self, backoff_s: float, steady_s: Callable[[], float]) -> None:
        self._backoff_s, self._steady_s = backoff_s, steady_s
        self._lock = threading.Lock()
        self._failures, self._since_s = 0, 0.0

    def over(self) -> None:
        """Note a success."""
        with self._lock:
            self._failures = 0

    def failed(self, error: Exception) -> float:
        """Note a failure; return how long to wait [s]; raise it where nothing has succeeded for too long."""
        with self._lock:
            now_s = self._steady_s()
            if not self._failures:
                self._since_s = now_s
            self._failures += 1
            failures, lasted_s = self._failures, now_s - self._since_s
        if failures >= OUTAGES_MAX and lasted_s >= OUTAGE_BACKOFFS * self._backoff_s:
            raise error
        return delay_s(failures, self._backoff_s)


def delay_s(failures: int, backoff_s: float) -> float:
    """Return the wait after so many failures in a row [s]."""
    return float(min(backoff_s * 2.0 ** (failures - 1), BACKOFF_MAX_S))


@dataclasses.dataclass(frozen=True, slots=True)
class _Outages:
    """What may be away."""

    registry: Outage
    looks: Outage
    """At the question whether all is done."""
    items: Outage
    """What items need: store, registry, source."""


class Pool:
    """Workers of one process.

    Args:
        context: What work needs of this process; without a bus, topics are in its memory.
        handler: Makes the handler of one thread.
        operations: Names of the chains whose items are done here, in their order.
        flow: The flow whose items are published here; None: every flow.
        looks_max: Waits of ``POLL_S`` or less while workers are busy, before ``done`` is asked all the same.
    """

    def __init__(
        self,
        context: RunContext,
        handler: Callable[[], Handler],
        *,
        operations: Sequence[str],
        flow: str | None,
        looks_max: int = LOOKS_MAX,
    ) -> None:
        self._context, self._handler, self._looks_max = context, handler, looks_max
        self._flow, self._operations = flow, tuple(reversed(operations))
        self._topics = context.topics or InProcessTopics()
        self._leases = Leases(context.database, context.owner, now_s=context.now_s)
        self._publisher = Publisher(context, self._topics, operations, flow=flow)
        self._stopped = threading.Event()
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._away = _Outages(*(Outage(context.backoff_s, context.steady_s) for _ in range(3)))
        self._busy = 0
        bodies = [self._publish, *[self._work] * context.workers]
        self._threads = [threading.Thread(target=self._guarded, args=(body,), daemon=True) for body in bodies]

    def run_until(self, done: Callable[[], bool]) -> None:
        """Work until ``done``, which is asked when no worker is busy, and now and then.

        Raises:
            EnvironmentFailedError: If store, registry or sources stay away; what was not done is still due.
            PolyremeError: The first other error that a worker met; what was not done is still due.
        """
        for thread in self._threads:
            thread.start()
        try:
            while not self._stopped.is_set() and not self._is_done(done):
                self._wait()
        finally:
            self._stopped.set()
            self._publisher.wake()
            for thread in self._threads:
                thread.join()
            with contextlib.suppress(EnvironmentFailedError):
                self._leases.close()
        if self._failure is not None:
            raise self._failure

    def _is_done(self, done: Callable[[], bool]) -> bool:
        """Ask whether all is done; an answer that can't be had now is no."""
        try:
            found = done()
        except Exception as error:
            if not _is_away(error):
                raise
            self._stopped.wait(self._away.looks.failed(error))
            return False
        self._away.looks.over()
        self._away.registry.over()
        return found

    def _wait(self) -> None:
        """Wait until no worker is busy, or for a while."""
        for _ in range(self._looks_max):
            with self._changed:
                self._changed.wait(POLL_S)
                if self._stopped.is_set() or not self._busy:
                    return

    def _guarded(self, body: Callable[[], None]) -> None:
        try:
            body()
        except BaseException as error:  # noqa: BLE001 - handed to the caller's thread, which raises it
            self._stopped.set()
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()

    def _publish(self) -> None:
        while not self._stopped.is_set():
            try:
                self._publisher.run(self._stopped)
            except EnvironmentFailedError as error:
                self._stopped.wait(self._away.registry.failed(error))

    def _work(self) -> None:
        """Work by what a subscription brings; while the bus is away, by what the registry has."""
        handler, failures, retry_s = self._handler(), 0, 0.0
        subscription: Subscription | None = None
        try:
            while not self._stopped.is_set():
                deliveries: Sequence[Delivery] = ()
                begun_s = self._context.steady_s()
                if failures and begun_s < retry_s:
                    if not self._take_any(handler):
                        self._stopped.wait(min(POLL_S, retry_s - begun_s))
                    continue
                try:
                    subscription = subscription or self._topics.subscribe(self._operations[::-1], group=GROUP)
                    deliveries = subscription.receive(count_max=1, timeout_s=POLL_S)
                    failures = 0
                except EnvironmentFailedError as error:
                    _log.warning("the bus is away, items are taken from the registry: %s", error)
                    if subscription is not None:
                        subscription.close()
                    subscription, failures, now_s = None, failures + 1, self._context.steady_s()
                    retry_s = now_s + max(
                        delay_s(failures, self._context.backoff_s), AWAY_WORK_RATIO * (now_s - begun_s)
                    )
                for delivery in deliveries:
                    assert subscription is not None
                    self._take(handler, subscription, delivery)
                if not deliveries:
                    self._take_any(handler)
        finally:
            handler.close()
            if subscription is not None:
                subscription.close()

    def _take(self, handler: Handler, subscription: Subscription, delivery: Delivery) -> None:
        """Do the item of one delivery. The row keeps what is due: the publisher sends it again after a failure."""
        key = delivery.message.key
        if self._do(handler, lambda: self._leases.claim(key)) is None:
            subscription.negative(delivery)
        else:
            subscription.acknowledge(delivery)

    def _take_any(self, handler: Handler) -> bool:
        """Do an item that no topic brought: its message was lost, the bus is away, or another worker has too many."""
        return bool(self._do(handler, lambda: self._leases.claim_any(self._flow, self._operations)))

    def _do(self, handler: Handler, claim: Callable[[], Claimed | None]) -> bool | None:
        """Claim an item and do it; return whether there was one, or None if the registry was away: nothing is noted."""
        claimed: Claimed | None = None
        with self._working():
            try:
                claimed = claim()
                self._away.registry.over()
                if claimed is None:
                    return False
                self._handle(handler, claimed.item)
                self._leases.forget(claimed.item.key)
                self._away.items.over()
            except Exception as error:  # noqa: BLE001 - raised again when the tries are used up
                wait_s = self._failed(claimed, error)
                if claimed is None:
                    self._stopped.wait(wait_s)
                    return None
        self._publisher.wake()
        return True

    def _handle(self, handler: Handler, item: WorkItem) -> None:
        begun_s, done = self._context.steady_s(), False
        try:
            handler.do(item)
            done = True
        finally:
            if self._context.on_item is not None:
                self._context.on_item(item, self._context.steady_s() - begun_s, done)

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
        away = _is_away(error)
        ours = not isinstance(error, PolyremeError)
        wait_s = 0.0
        last = not away and not ours
        if away:
            wait_s = (self._away.registry if claimed is None else self._away.items).failed(error)
        elif ours:
            tries = claimed.tries if claimed is not None else TRIES_MAX
            last = tries >= TRIES_MAX
            wait_s = delay_s(tries, self._context.backoff_s)
        if claimed is not None:
            text = f"{type(error).__name__}: {error}" if ours else str(error)
            with contextlib.suppress(EnvironmentFailedError):
                due_s = self._context.now_s() + wait_s
                self._leases.release(claimed.item.key, due_s=due_s, error=text, counts_try=ours)
        if last:
            raise error
        return wait_s


def _is_away(error: Exception) -> bool:
    """Tell whether an error may pass by itself."""
    return isinstance(error, (EnvironmentFailedError, RetryableError)) and not isinstance(error, IndexDamagedError)
