"""A cluster that answers late, wrongly, twice or never: the port between the simulated operator and the store.

A call travels to the store and back in tasks of its own, so what a crashed operator has sent still lands.
"""

from __future__ import annotations

import asyncio
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

from polyreme_operator.adapters.embedded.cluster import EmbeddedCluster
from polyreme_operator.port import (
    PAGE_OBJECTS,
    GoneError,
    ListPage,
    Manifest,
    ObjectRef,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    WatchEvent,
)
from polyreme_operator.sim.invariants import LATENCY_S

SLOW_S = 8.0
LAG_S = 3.0
LATE_S = 8.0
"""Longest time by which a write lands behind the timeout that its caller was told."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PortFaults:
    """Chances of each fault, by call."""

    too_many: float = 0.0
    error_before: float = 0.0
    error_after: float = 0.0
    timeout_before: float = 0.0
    timeout_after: float = 0.0
    timeout_late: float = 0.0
    """The caller is told of a timeout and goes on; the write lands behind it."""
    slow: float = 0.0
    crash_before: float = 0.0
    crash_after: float = 0.0
    watch_drop: float = 0.0
    watch_gone: float = 0.0
    watch_lag: float = 0.0


NO_FAULTS = PortFaults()
_WRITES = frozenset({"create", "patch", "delete", "bind"})


class FaultyPort:
    """``ClusterPort`` with faults, for one life of the operator.

    Args:
        cluster: The store behind it.
        loop: Where calls travel.
        rng: Draws the faults.
        faults: Returns the chances that hold now.
        reached: Counts (fault, write point) that came about.
        crash: Ends this life of the operator.
        broke: Notes a broken rule: what was written without a precondition.
        landing: Told, as a write lands, when it was sent.
    """

    def __init__(
        self,
        cluster: EmbeddedCluster,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        faults: Callable[[], PortFaults],
        reached: Counter[tuple[str, str]],
        crash: Callable[[], None],
        broke: Callable[[str, str], None],
        landing: Callable[[float], None],
    ) -> None:
        self._cluster, self._loop, self._rng, self._broke, self._landing = cluster, loop, rng, broke, landing
        self._faults, self._reached, self._crash = faults, reached, crash
        self._travelling: set[asyncio.Task[None]] = set()

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        """List, perhaps."""
        page: ListPage = await self._call(
            "list", kind, lambda: self._cluster.store.list(kind, namespace=namespace, limit=limit, continue_=continue_)
        )
        return page

    async def get(self, ref: ObjectRef) -> Manifest:
        """Read, perhaps."""
        found: Manifest = await self._call("get", ref.kind, lambda: self._cluster.store.get(ref))
        return found

    async def create(self, manifest: Manifest) -> Manifest:
        """Create, perhaps without hearing of it."""
        made: Manifest = await self._call("create", manifest["kind"], lambda: self._cluster.store.create(manifest))
        return made

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        """Patch, perhaps without hearing of it."""
        if resource_version is None:
            self._broke("every patch bears a resource version", str(ref))
        changed: Manifest = await self._call(
            "patch",
            ref.kind,
            lambda: self._cluster.store.patch(
                ref, merge_patch, resource_version=resource_version, subresource=subresource
            ),
        )
        return changed

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        """Delete, perhaps without hearing of it."""
        if not uid:
            self._broke("every delete bears a UID", str(ref))
        await self._call(
            "delete",
            ref.kind,
            lambda: self._cluster.store.delete(
                ref, uid=uid, resource_version=resource_version, grace_period_s=grace_period_s
            ),
        )

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        """Bind a pod, perhaps without hearing of it."""
        if not uid:
            self._broke("every binding bears a UID", str(ref))
        await self._call("bind", ref.kind, lambda: self._cluster.store.bind(ref, uid=uid, node=node))

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        """Watch through a cache that may lag, until the connection drops."""
        if self._draw("watch_gone", f"watch {kind}"):
            raise GoneError(f"resource version {resource_version} is too old")
        async for event in self._cluster.watch(kind, resource_version=resource_version, namespace=namespace):
            lagged = self._draw("watch_lag", f"watch {kind}")
            await asyncio.sleep(self._rng.random() * (LAG_S if lagged else LATENCY_S))
            if self._draw("watch_drop", f"watch {kind}"):
                return
            yield event

    async def _call(self, verb: str, kind: str, act: Callable[[], Any]) -> Any:
        """Send a call on its way and wait for its answer."""
        answer: asyncio.Future[Any] = self._loop.create_future()
        task = self._loop.create_task(self._travel(verb, kind, act, answer))
        self._travelling.add(task)
        task.add_done_callback(self._travelling.discard)
        return await answer

    async def _travel(self, verb: str, kind: str, act: Callable[[], Any], answer: asyncio.Future[Any]) -> None:
        point, sent_s = f"{verb} {kind}", self._loop.time()
        # Slow on the way there, or on the way back: then what is told is old when it comes. Not so for a single read:
        # the rule that a success counts reckons from what a read could know.
        slow = self._draw("slow", point)
        late_answer = slow and verb != "get" and self._rng.random() < 0.5
        await asyncio.sleep(self._rng.random() * (SLOW_S if slow and not late_answer else LATENCY_S))
        for fault, error in (
            ("too_many", TooManyRequestsError("429", delay_s=1.0 + self._rng.random())),
            ("error_before", ServerError("500")),
            ("timeout_before", PortTimeoutError("timeout")),
        ):
            if self._draw(fault, point):
                _answer(answer, error=error)
                return
        if verb in _WRITES and self._draw("timeout_late", point):
            _answer(answer, error=PortTimeoutError("timeout"))
            await asyncio.sleep(self._rng.random() * LATE_S)
        if verb in _WRITES and self._draw("crash_before", point):
            self._crash()
        self._landing(sent_s)
        try:
            result = act()
        except Exception as error:  # noqa: BLE001 - whatever the store raises is the call's answer
            _answer(answer, error=error)
            return
        if verb in _WRITES:
            if self._draw("crash_after", point):
                self._crash()
                return
            for fault, unknown in (("error_after", ServerError("500")), ("timeout_after", PortTimeoutError("timeout"))):
                if self._draw(fault, point):
                    _answer(answer, error=unknown)
                    return
        await asyncio.sleep(self._rng.random() * (SLOW_S if late_answer else LATENCY_S))
        _answer(answer, result=result)

    def _draw(self, fault: str, point: str) -> bool:
        chance: float = getattr(self._faults(), fault)
        if chance <= 0.0 or self._rng.random() >= chance:
            return False
        self._reached[fault, point] += 1
        return True


def _answer(answer: asyncio.Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Give the answer, unless nobody waits for it any more."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
