"""Watches the work in the registry while this replica leads: for metrics, and to size the pools of workers."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Protocol

from polyreme_api.clock import Clock
from polyreme_api.errors import PolyremeError
from polyreme_cluster.port import ClusterPort, Manifest, ObjectRef, PortError
from polyreme_datahub.probe import Work
from polyreme_datahub.registry.backlog import Backlog
from polyreme_datahub.runner.pool_sizes import ItemTimes, PoolLimits, PoolState, pool_sizes
from polyreme_datahub_service.metrics import DataMetrics

LOOK_EVERY_S = 5.0
LETTERS_EVERY = 12
"""Looks from one count of dead letters to the next: it reads all of them."""
ASSERT_EVERY = 6
"""Looks from one write of an unchanged size to the next: another client may have changed it."""
GPU_SUFFIX = "-gpu"
SCALE = "scale"

_log = logging.getLogger(__name__)


class Looks(Protocol):
    """Reads the registry; called in threads."""

    def work(self, *, since_s: float) -> Work:
        """Return what is due, and what ended since a time."""
        ...

    def dead_letters(self) -> Mapping[str, int]:
        """Count the dead letters of each operation."""
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerPools:
    """The Deployments whose pods do the work."""

    deployment: str
    """That of workers without a GPU; the other one's name ends in ``-gpu``."""
    namespace: str
    operations: frozenset[str]
    """Operations that they work on; others are not theirs to do."""
    limits: Mapping[str, PoolLimits]
    """By device. A device that is not named has no Deployment."""

    def name(self, device: str) -> str:
        """Return the name of the Deployment of a device's workers."""
        return self.deployment + (GPU_SUFFIX if device == "gpu" else "")


class PoolScaler:
    """Gives Deployments the sizes that their backlogs ask for.

    Args:
        cluster: The cluster.
        pools: The Deployments.
        metrics: Shows what is asked for.
    """

    def __init__(self, cluster: ClusterPort, pools: WorkerPools, metrics: DataMetrics) -> None:
        self._cluster, self._pools, self._metrics = cluster, pools, metrics
        self._states: dict[str, PoolState] = {}
        self._written: dict[str, int] = {}
        self._looks = 0
        self.trouble = ""
        """Why a Deployment can't be scaled; empty if all could."""

    async def size(self, backlog: list[Backlog], item_s: Mapping[str, float], *, now_s: float) -> None:
        """Size the pools for a backlog."""
        mine = [one for one in backlog if one.operation in self._pools.operations]
        if not self._states:
            self._states = {device: PoolState(size=await self._present(device)) for device in self._pools.limits}
        self._states = pool_sizes(mine, item_s, states=self._states, limits=self._pools.limits, now_s=now_s)
        self._looks += 1
        troubles = []
        for device, state in self._states.items():
            name = self._pools.name(device)
            self._metrics.workers_wanted.labels(name).set(state.size)
            if self._written.get(device) == state.size and self._looks % ASSERT_EVERY:
                continue
            try:
                await self._write(device, {"spec": {"replicas": state.size}})
                if self._written.get(device) != state.size:
                    _log.info("workers %s: %d wanted", name, state.size)
                self._written[device] = state.size
            except PortError as error:
                self._written.pop(device, None)
                if state.size:
                    troubles.append(f"the workers {self._pools.namespace}/{name} can't be scaled: {error}")
        if troubles and troubles[0] != self.trouble:
            _log.warning("%s", troubles[0])
        self.trouble = troubles[0] if troubles else ""

    async def _present(self, device: str) -> int:
        """Return the size that an earlier leader gave a pool: it must not lose its workers by the change."""
        try:
            answer = await self._write(device, {})
            return int((answer.get("spec") or {}).get("replicas") or 0)
        except PortError:
            return 0

    async def _write(self, device: str, patch: Manifest) -> Manifest:
        ref = ObjectRef(kind="Deployment", namespace=self._pools.namespace, name=self._pools.name(device))
        return await self._cluster.patch(ref, patch, subresource=SCALE)


class WorkWatch:
    """Looks at the work every few seconds, until cancelled.

    Args:
        looks: Reads the registry.
        metrics: Shows what was seen.
        clock: Clock.
        jobs: Counts the jobs by the state of their data.
        scaler: Sizes the pools; None: they keep their sizes.
    """

    def __init__(
        self,
        looks: Looks,
        metrics: DataMetrics,
        clock: Clock,
        *,
        jobs: Callable[[], Mapping[str, int]],
        scaler: PoolScaler | None = None,
    ) -> None:
        self._looks, self._metrics, self._clock = looks, metrics, clock
        self._jobs, self._scaler = jobs, scaler
        self._times = ItemTimes()

    async def run(self) -> None:
        """Look until cancelled; a registry that is away is another one's to report."""
        count = 0
        while True:
            self._metrics.show_jobs(self._jobs())
            try:
                await self._look(letters=count % LETTERS_EVERY == 0)
            except PolyremeError as error:
                _log.debug("no look at the work: %s", error)
            count += 1
            await self._clock.sleep(LOOK_EVERY_S)

    async def _look(self, *, letters: bool) -> None:
        now_s = self._clock.now_s()
        work = await asyncio.to_thread(self._looks.work, since_s=self._times.since_s(now_s))
        item_s = self._times.look(work.backlog, work.done, now_s=now_s)
        self._metrics.show_work(work.backlog, item_s)
        if self._scaler is not None:
            await self._scaler.size(list(work.backlog), item_s, now_s=self._clock.steady_s())
        if letters:
            self._metrics.show_dead_letters(await asyncio.to_thread(self._looks.dead_letters))
