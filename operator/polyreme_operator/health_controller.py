"""Carries out decisions about the health of nodes; ``health_decision`` decides.

A node is tainted only after its policy has stored the charge, and each node is written in one patch with its resource
version, so that a change by another client is never overwritten. Incidents and repairs follow and are never waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from polyreme_api import labels
from polyreme_cluster.port import ConflictError, InvalidObjectError, NotFoundError, ObjectRef, PortError
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.health.node import HealthNode, patch_of
from polyreme_operator.health.record import Record, parse
from polyreme_operator.health_decision.decide import decide
from polyreme_operator.health_decision.snapshot import Batch, NodeWrite, PolicyWrite
from polyreme_operator.health_observer import HealthObserver
from polyreme_operator.health_requests import HealthRequests
from polyreme_operator.settings import Settings
from polyreme_operator.types.actions import EmitEvent
from polyreme_operator.types.observer import Observer
from polyreme_operator.work_queue import WorkQueue

_log = logging.getLogger(__name__)


class HealthController:
    """Task of the operator that keeps the state of every node.

    Args:
        cluster: The cluster, and what is known of it.
        settings: Settings of the installation.
        emit: Queues an event.
        observer: Receives reports, for metrics.
        synced: Tells whether every kind has been listed.
    """

    def __init__(
        self,
        cluster: CachedCluster,
        settings: Settings,
        *,
        emit: Callable[[EmitEvent], None],
        observer: Observer,
        synced: Callable[[], bool],
    ) -> None:
        self._cluster, self._clock, self._settings = cluster, cluster.clock, settings
        self._emit, self._observer, self._synced = emit, observer, synced
        self._known = HealthObserver(cluster.cache, settings)
        self._writes = asyncio.Semaphore(settings.writes_max)
        self._wake = asyncio.Event()
        self._timers = WorkQueue(self._clock.now_s, processing_max=1, backoff_s=settings.backoff_s)
        self._requests = HealthRequests(cluster, self._known, settings, observer, again=self._again_at)

    def look(self) -> None:
        """Note that nodes or policies have changed."""
        self._wake.set()

    async def run(self) -> None:
        """Decide and write until cancelled."""
        failures = 0
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._wake.clear()
                try:
                    wait_s = await self._pass(tasks) if self._synced() else self._settings.idle_s
                    failures = 0
                except Exception as error:  # noqa: BLE001 - no error of a decision may stop the operator
                    failures += 1
                    _log.info("health is decided again: %s", error, exc_info=not isinstance(error, PortError))
                    await self._clock.sleep(self._settings.backoff_s(failures))
                    continue
                await self._clock.sleep(self._settings.health_every_s)
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(max(0.0, wait_s)):
                        await self._wake.wait()

    async def _pass(self, tasks: asyncio.TaskGroup) -> float:
        """Observe, decide and apply; return how long nothing is due."""
        now_s, index = self._clock.now_s(), self._cluster.cache.health
        writable = self._requests.ready()
        names = sorted({*index.take_dirty(), *self._timers.due()})
        try:
            batch = decide(self._known.snapshot(names, now_s, writable=writable))
            self._known.memory = batch.memory
            self._requests.skipped.update(() if writable else names)
            names += [write.node.name for write in batch.nodes]
            for name, at_s in batch.wake_at_s.items():
                self._timers.add_at(name, max(at_s, now_s + self._settings.health_every_s))
            self._report(batch, names)
            refused = [write.policy.name for write in batch.policies if not await self._write_policy(write)]
            writes = (self._write_node(write, refused) for write in batch.nodes)
            for result in await asyncio.gather(*writes, return_exceptions=True):
                if isinstance(result, BaseException):
                    raise result
        except BaseException:
            index.touch(*names)
            raise
        for request in self._requests.due(batch):
            tasks.create_task(request)
        due_s = [self._timers.next_due_s(), *(grant.status_at_s for grant in batch.memory.grants.values())]
        waits_s = (each - self._clock.now_s() for each in due_s if each is not None and each > now_s)
        return min(waits_s, default=self._settings.idle_s)

    def _report(self, batch: Batch, names: Sequence[str]) -> None:
        observer, cache = self._observer, self._cluster.cache
        for name, error in batch.failed.items():
            _log.error("deciding about the health of node %s raised an error", name, exc_info=error)
        for event in batch.events:
            self._emit(event)
        for each in batch.observed:
            observer.on_node_fault(each.fault_class, f"Observe{each.answer}")
        states = Counter(seen.state for seen in batch.memory.nodes.values() if seen.state)
        observer.on_node_states(states, list(self._out(names)))
        if batch.fences_held != cache.node_kind.fences_held:
            what = "none of them counts as lost" if batch.fences_held else "nodes count as lost again"
            _log.warning("%s nodes are not ready: %s", len(cache.health.not_ready_since_s), what)
            self._cluster.note(cache.hold_fences(batch.fences_held))

    def _out(self, names: Sequence[str]) -> Iterator[tuple[HealthNode, Record]]:
        """Yield those of some nodes that are out of service."""
        index = self._cluster.cache.health
        for name in names:
            if name in index.tainted and (record := parse(index.nodes[name].annotation)[0]) is not None:
                yield index.nodes[name], record

    def _again_at(self, name: str, at_s: float) -> None:
        self._timers.add_at(name, at_s)
        self._wake.set()

    def _again(self, *names: str) -> None:
        self._cluster.cache.health.touch(*names)
        self._wake.set()

    async def _write_policy(self, write: PolicyWrite) -> bool:
        """Write a policy's status by compare-and-swap; tell whether it was stored."""
        ref = ObjectRef(kind=labels.KIND_FAULT_POLICY, name=write.policy.name)
        try:
            version = write.policy.resource_version
            result = await self._cluster.patch_status(ref, write.patch, resource_version=version)
        except (ConflictError, NotFoundError):
            await self._cluster.refresh(ref)
            self._again(*write.nodes)
            return False
        self._cluster.take(result)
        if write.event is not None:
            self._emit(write.event)
        return True

    async def _write_node(self, write: NodeWrite, refused: Sequence[str]) -> None:
        name, index, observer = write.node.name, self._cluster.cache.health, self._observer
        node, ref, shown_s = index.nodes.get(name), ObjectRef(kind="Node", name=name), index.shown_s.get(name)
        if node is None or node.judged != write.node.judged or write.charge in refused:
            # It has changed since, such as by a person who released it, or its charge is not stored.
            return self._again(name)
        try:
            async with self._writes:
                patch = patch_of(node, write.record)
                result = await self._cluster.port.patch(ref, patch, resource_version=node.resource_version)
        except (ConflictError, NotFoundError):
            await self._cluster.refresh(ref)
            return self._again(name)
        except InvalidObjectError as error:
            why, reason = f"the API server refuses the record of its health: {error}", "NodeHealthUnreadable"
            self._emit(EmitEvent(ref=ref, uid=node.uid, reason=reason, message=why, warning=True, key="record-refused"))
            return None
        now_s = self._clock.now_s()
        self._known.said[name] = write.said
        self._cluster.take(result)
        if write.takes_out is not None:
            observer.on_node_fault(write.takes_out.fault_class, write.takes_out.answer.value)
            if shown_s is not None:
                observer.on_node_tainted(now_s - shown_s)
        for ended in write.repairs:
            observer.on_node_repair(*ended)
        for event in write.events:
            self._emit(event)
        return None
