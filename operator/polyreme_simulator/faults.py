"""A cluster that answers late, wrongly, twice or never: the port between the simulated operator and the store.

A call travels to the store and back in tasks of its own, so what a crashed or stopped operator has sent still lands.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import random
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol, TypeAlias, TypeVar

from polyreme_cluster.election import LEASE_NAME
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import (
    ConflictError,
    GoneError,
    InvalidObjectError,
    ObjectRef,
    PortError,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    WatchEvent,
)
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_simulator.job_facts import LATENCY_S

_Answer = TypeVar("_Answer")
_Act: TypeAlias = Callable[[], Awaitable[Any]]
SLOW_S = 8.0
LAG_S = 3.0
LATE_S = 8.0
"""Longest time after a reported timeout until the write lands."""
STOPPED_S = (5.0, 25.0, 40.0)
"""How long a stopped process stays so: within its leadership, and beyond it."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PortFaults:
    """Chances of each fault, by call."""

    conflict: float = 0.0
    """Another client was first: another version, another object of that name."""
    too_many: float = 0.0
    error_before: float = 0.0
    error_after: float = 0.0
    timeout_before: float = 0.0
    timeout_after: float = 0.0
    timeout_late: float = 0.0
    """The caller gets a timeout and continues; the write lands later."""
    slow: float = 0.0
    crash_before: float = 0.0
    crash_after: float = 0.0
    stopped: float = 0.0
    """The process is stopped (SIGSTOP) for longer than its leadership lasts; the write lands at some time meanwhile."""
    watch_drop: float = 0.0
    watch_gone: float = 0.0
    watch_lag: float = 0.0
    aim: str = ""
    """A write point, or a watch, at which every fault is as likely as ``aimed``: rare ones are struck too."""
    aimed: float = 0.0


NO_FAULTS = PortFaults()
_WRITES = frozenset({"create", "patch", "delete", "bind", "evict"})
TOUCHED = "example.com/touched"
"""Annotation that another client sets a moment before a write lands."""


class Life(Protocol):
    """One life of a replica, as its port sees it."""

    def crash(self) -> None:
        """End it."""

    def stop(self, for_s: float) -> None:
        """Stop the process for a while."""

    def broke(self, rule: str, what: str) -> None:
        """Note a broken rule: what was written without a precondition."""

    def sending(self, verb: str, ref: ObjectRef, *, uid: str) -> None:
        """Note a write that leaves the process now; ``uid`` is the object's, or its owner's for one that is created."""

    def landing(self, sent_s: float) -> None:
        """Note that a write lands now, and when it was sent."""

    def forcing(self, uid: str) -> None:
        """Note that a pod is deleted without any grace."""

    def refusal(self, verb: str, ref: ObjectRef, *, uid: str) -> str:
        """Return the sentence by which the API server refuses a write for good; empty: it takes it."""


class FaultyPort(ForwardingPort):
    """``ClusterPort`` with faults, for one life of one replica of the operator.

    Args:
        cluster: The store that answers.
        loop: Where calls travel.
        rng: Draws the faults.
        faults: Returns the chances that hold now.
        reached: Counts (fault, write point) that came about.
        life: What faults do to the process, and what must be noted of its writes.
    """

    def __init__(
        self,
        cluster: EmbeddedCluster,
        loop: asyncio.AbstractEventLoop,
        rng: random.Random,
        *,
        faults: Callable[[], PortFaults],
        reached: Counter[tuple[str, str]],
        life: Life,
    ) -> None:
        super().__init__(cluster)
        self._cluster, self._loop, self._rng, self._life = cluster, loop, rng, life
        self._faults, self._reached = faults, reached
        self._cut = False
        self._travelling: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Send nothing any more: the process is dead, whatever its code does on its way out."""
        self._cut = True

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

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        """Send a call and wait for its answer, which may never come."""
        self._check(call)
        verb, ref, uid = call.verb, call.ref, call.uid or ""
        if verb == "create" and call.body is not None:
            owners = call.body["metadata"].get("ownerReferences") or [{"uid": ""}]
            uid = owners[0]["uid"]
        if self._cut:
            raise PortTimeoutError("the process is dead")
        answer: asyncio.Future[_Answer] = self._loop.create_future()
        point = _point(verb, ref) + _more_of(call)
        way = self._write(point, verb, ref, act, answer, uid=uid) if verb in _WRITES else None
        if way is not None:
            self._life.sending(verb, ref, uid=uid)
        # A request in flight belongs to no process: it arrives even if the sender is stopped or dead.
        task = self._loop.create_task(way or self._read(verb, ref, act, answer), context=contextvars.Context())
        self._travelling.add(task)
        task.add_done_callback(self._travelling.discard)
        return await answer

    def _check(self, call: Call) -> None:
        """Note what is sent without its precondition, or must never be sent."""
        if call.verb == "patch" and call.resource_version is None:
            self._life.broke("every patch bears a resource version", str(call.ref))
        if call.verb == "patch" and "spec" in (call.body or {}) and call.ref.kind.startswith("Training"):
            self._life.broke("the operator never writes a spec", str(call.ref))
        if call.verb == "delete" and not call.uid:
            self._life.broke("every delete bears a UID", str(call.ref))
        if call.verb == "delete" and call.ref.kind == "Pod" and call.grace_period_s == 0:
            self._life.forcing(call.uid or "")
        if call.verb == "bind" and not call.uid:
            self._life.broke("every binding bears a UID", str(call.ref))

    async def _read(self, verb: str, ref: ObjectRef, act: _Act, answer: asyncio.Future[Any]) -> None:
        point = f"{verb} {ref.kind}"
        # Slow there, or slow back: then the answer is stale when it arrives. Not so for a single read:
        # the rule that a success counts reckons from what a read could know.
        slow = self._draw("slow", point)
        late_answer = slow and verb != "get" and self._rng.random() < 0.5
        await asyncio.sleep(self._rng.random() * (SLOW_S if slow and not late_answer else LATENCY_S))
        if not self._refused(point, answer):
            await self._answered(act, answer, SLOW_S if late_answer else LATENCY_S)

    async def _write(
        self,
        point: str,
        verb: str,
        ref: ObjectRef,
        act: Callable[[], Awaitable[Any]],
        answer: asyncio.Future[Any],
        *,
        uid: str,
    ) -> None:
        sent_s = self._loop.time()
        slow = self._draw("slow", point)
        late_answer = slow and self._rng.random() < 0.5
        await asyncio.sleep(self._rng.random() * (SLOW_S if slow and not late_answer else LATENCY_S))
        if self._refused(point, answer):
            return
        if self._draw("timeout_late", point):
            _answer(answer, error=PortTimeoutError("timeout"))
            await asyncio.sleep(self._rng.random() * LATE_S)
        if self._draw("stopped", point):
            stopped_s = self._rng.choice(STOPPED_S)
            self._life.stop(stopped_s)
            await asyncio.sleep(self._rng.random() * stopped_s)
        if self._draw("crash_before", point):
            self._life.crash()
        if sentence := self._life.refusal(verb, ref, uid=uid):
            _answer(answer, error=InvalidObjectError(sentence))
            return
        if self._draw("conflict", point) and not await self._overtake(verb, ref, act):
            _answer(answer, error=ConflictError("409"))
            return
        self._life.landing(sent_s)
        try:
            result = await act()
        except Exception as error:  # noqa: BLE001 - whatever the store raises is the call's answer
            _answer(answer, error=error)
            return
        if self._draw("crash_after", point):
            self._life.crash()
            return
        if self._draw("error_after", point):
            _answer(answer, error=ServerError("500"))
            return
        if self._draw("timeout_after", point):
            _answer(answer, error=PortTimeoutError("timeout"))
            return
        await asyncio.sleep(self._rng.random() * (SLOW_S if late_answer else LATENCY_S))
        _answer(answer, result=result)

    def _refused(self, point: str, answer: asyncio.Future[Any]) -> bool:
        """Answer with an error before anything is done, perhaps."""
        delay_s = 1.0 + self._rng.random()
        if self._draw("too_many", point):
            _answer(answer, error=TooManyRequestsError("429", delay_s=delay_s))
        elif self._draw("error_before", point):
            _answer(answer, error=ServerError("500"))
        elif self._draw("timeout_before", point):
            _answer(answer, error=PortTimeoutError("timeout"))
        else:
            return False
        return True

    async def _answered(self, act: _Act, answer: asyncio.Future[Any], latency_s: float) -> None:
        try:
            result = await act()
        except Exception as error:  # noqa: BLE001 - whatever the store raises is the call's answer
            _answer(answer, error=error)
            return
        await asyncio.sleep(self._rng.random() * latency_s)
        _answer(answer, result=result)

    async def _overtake(self, verb: str, ref: ObjectRef, act: Callable[[], Awaitable[object]]) -> bool:
        """Let another client be first, so that the write fails by its own precondition; False: it just fails."""
        if verb == "delete":
            return False
        try:
            if verb == "patch":
                touched = {TOUCHED: f"{self._rng.random():.6f}"}
                self._cluster.store.patch(ref, {"metadata": {"annotations": touched}})
            else:
                # The same call arrived once before, and its answer was lost.
                await act()
        except PortError:
            return True
        return True

    def _draw(self, fault: str, point: str) -> bool:
        faults = self._faults()
        if faults is NO_FAULTS:
            return False
        chance: float = max(faults.aimed, getattr(faults, fault)) if point == faults.aim else getattr(faults, fault)
        if chance <= 0.0 or self._rng.random() >= chance:
            return False
        self._reached[fault, point] += 1
        return True


def _more_of(call: Call) -> str:
    """What a write of a job's status does, where that is a write point of its own."""
    if call.verb != "patch" or call.ref.kind != "TrainingJob":
        return ""
    status = (call.body or {}).get("status") or {}
    if status.get("preemption"):
        return " that is preempted"
    return " that begins an attempt" if "number" in (status.get("attempt") or {}) else ""


def _point(verb: str, ref: ObjectRef) -> str:
    """Return the name of a place where the operator writes."""
    return f"{verb} {ref.kind}{' of leadership' if ref.name == LEASE_NAME else ''}"


def _answer(answer: asyncio.Future[Any], *, result: Any = None, error: BaseException | None = None) -> None:
    """Set the answer, unless its caller has stopped waiting."""
    if answer.done():
        return
    if error is not None:
        answer.set_exception(error)
    else:
        answer.set_result(result)
