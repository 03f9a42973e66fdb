"""Runs the planner outside the operator's event loop: in another process, one request after another.

A scheduling cycle uses the plans that exist; a job without its plans has the reason ``Planning``. The answer to a
request depends on the request alone, so a simulated operator, which plans synchronously, stays deterministic.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from concurrent.futures.process import BrokenProcessPool
from typing import Protocol

from polyreme_operator.cache.plan_book import plan_sizes
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.types.changes import Changes
from polyreme_operator.types.plans import JobPlans, PlanRequest
from polyreme_system.parent_death import end_with_parent

TRIES_MAX = 2
"""Planner processes that may die on one request before its job is refused."""
ANSWER_MAX_S = 120.0
"""Time limit of one request, since other requests wait meanwhile."""
_log = logging.getLogger(__name__)


class Planner(Protocol):
    """Plans a job at every worker count that it accepts."""

    async def plan(self, request: PlanRequest) -> JobPlans:
        """Answer a request; raises only on cancellation."""
        ...


class InlinePlanner:
    """Plans in the caller's process: for a job that was planned before, for tests and for the simulator."""

    async def plan(self, request: PlanRequest) -> JobPlans:
        """Answer a request."""
        return plan_sizes(request)


class ProcessPlanner:
    """Plans in a separate process, started on the first request, so that the event loop is not blocked."""

    def __init__(
        self, work: Callable[[PlanRequest], JobPlans] = plan_sizes, *, answer_max_s: float = ANSWER_MAX_S
    ) -> None:
        self._work, self._answer_max_s = work, answer_max_s
        self._pool: concurrent.futures.ProcessPoolExecutor | None = None

    async def plan(self, request: PlanRequest) -> JobPlans:
        """Answer a request; one on which the process dies repeatedly is refused."""
        for _ in range(TRIES_MAX):
            if self._pool is None:
                self._pool = concurrent.futures.ProcessPoolExecutor(
                    max_workers=1,
                    mp_context=multiprocessing.get_context("spawn"),
                    initializer=_begin,
                    initargs=(os.getpid(),),
                )
            try:
                async with asyncio.timeout(self._answer_max_s):
                    return await asyncio.get_running_loop().run_in_executor(self._pool, self._work, request)
            except TimeoutError:
                self.close()
                return JobPlans(
                    refused=f"planner failed: it found no plan within {self._answer_max_s:g} s; narrow the range of "
                    "worker counts or set a layout in spec.parallelism"
                )
            except BrokenProcessPool:
                _log.warning("the planner's process exited without an answer")
                self.close()
        return JobPlans(refused=f"planner failed: its process exited {TRIES_MAX} times without an answer")

    def close(self) -> None:
        """Stop the process without waiting for a running request."""
        pool, self._pool = self._pool, None
        if pool is None:
            return
        processes = list((pool._processes or {}).values())  # noqa: SLF001 - Python 3.14 has a public way
        pool.shutdown(wait=False, cancel_futures=True)
        for process in processes:
            process.kill()


class Planning:
    """Task of the operator that answers the cache's requests for plans."""

    def __init__(self, cache: ClusterCache, planner: Planner, note: Callable[[Changes], None]) -> None:
        self._cache, self._planner, self._note = cache, planner, note
        self._wanted = asyncio.Event()

    def look(self) -> None:
        """Note that the cache may have new requests."""
        self._wanted.set()

    async def run(self) -> None:
        """Answer requests until cancelled, oldest first."""
        while True:
            request = self._cache.plans.next()
            if request is None:
                self._wanted.clear()
                await self._wanted.wait()
                continue
            answer = await self._planner.plan(request)
            self._note(self._cache.take_plans(request, answer))


def _begin(parent: int) -> None:
    """End this process with the operator's, and ignore Ctrl-C, which the operator handles."""
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
