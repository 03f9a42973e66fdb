"""The controller gives Deployments of workers the size that the backlog asks for, and says why it can't."""

import asyncio
from typing import Any

from polyreme_api.errors import EnvironmentFailedError
from polyreme_cluster.forwarding_port import ForwardingPort
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, PortError
from polyreme_datahub.probe import Work
from polyreme_datahub.registry.backlog import Backlog
from polyreme_datahub.runner.pool_sizes import PoolLimits
from polyreme_datahub_service.metrics import DataMetrics
from polyreme_datahub_service.work_watch import (
    ASSERT_EVERY,
    LETTERS_EVERY,
    LOOK_EVERY_S,
    PoolScaler,
    WorkerPools,
    WorkWatch,
)
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_system.clock import SystemClock

CPU = ObjectRef(kind="Deployment", namespace="system", name="workers")
GPU = ObjectRef(kind="Deployment", namespace="system", name="workers-gpu")
LIMITS = {"cpu": PoolLimits(most=4, threads=2, drain_s=10.0), "gpu": PoolLimits(most=2, threads=1, drain_s=10.0)}


class Scales(ForwardingPort):
    """The ``/scale`` of some Deployments."""

    def __init__(self, **replicas: int) -> None:
        super().__init__(EmbeddedCluster(Store(new_uid=str, now_s=float)))
        self.replicas = {
            ObjectRef(kind="Deployment", namespace="system", name=name.replace("_", "-")): count
            for name, count in replicas.items()
        }
        self.writes: list[tuple[str, int]] = []
        self.error: PortError | None = None

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        assert (subresource, resource_version) == ("scale", None)
        if self.error is not None:
            raise self.error
        if ref not in self.replicas:
            raise NotFoundError(f"patch of {ref}: not found")
        wanted = (merge_patch.get("spec") or {}).get("replicas")
        if wanted is not None:
            self.writes.append((ref.name, wanted))
            self.replicas[ref] = wanted
        return {"kind": "Scale", "metadata": {}, "spec": {"replicas": self.replicas[ref]}}


def scaler(scales: Scales, operations: str = "compose embed") -> PoolScaler:
    pools = WorkerPools(
        deployment="workers", namespace="system", operations=frozenset(operations.split()), limits=LIMITS
    )
    return PoolScaler(scales, pools, DataMetrics())


def due(items: int, operation: str = "compose", device: str = "cpu") -> Backlog:
    return Backlog(operation=operation, device=device, items=items, records=items, leased=0)


def play(pools: PoolScaler, *looks: tuple[float, list[Backlog]]) -> None:
    async def story() -> None:
        for now_s, backlog in looks:
            await pools.size(backlog, {"compose": 1.0, "embed": 1.0}, now_s=now_s)

    asyncio.run(story())


def test_pools_get_workers_when_something_waits_and_none_when_nothing_has_for_a_while() -> None:
    scales = Scales(workers=0, workers_gpu=0)
    pools = scaler(scales)
    play(pools, (0.0, []), (5.0, [due(500), due(3, "embed", "gpu"), due(99, "unserved")]))
    assert scales.replicas == {CPU: 4, GPU: 1}
    play(pools, (10.0, []), (60.0, []))
    assert scales.replicas == {CPU: 4, GPU: 1}
    play(pools, (75.0, []))
    assert scales.replicas == {CPU: 0, GPU: 0}
    assert pools.trouble == ""


def test_a_new_leader_keeps_the_workers_that_there_are() -> None:
    scales = Scales(workers=3, workers_gpu=0)
    play(scaler(scales), (0.0, [due(1)]))
    assert scales.replicas[CPU] == 3


def test_an_unchanged_pool_size_is_rewritten_now_and_then() -> None:
    scales = Scales(workers=0, workers_gpu=0)
    pools = scaler(scales)
    play(pools, *((look * LOOK_EVERY_S, [due(500)]) for look in range(3 * ASSERT_EVERY)))
    assert scales.writes.count(("workers", 4)) == 1 + 3
    scales.replicas[CPU] = 0
    play(pools, *((look * LOOK_EVERY_S, [due(500)]) for look in range(ASSERT_EVERY)))
    assert scales.replicas[CPU] == 4


def test_what_can_not_be_scaled_is_named_while_something_waits_for_it() -> None:
    scales = Scales(workers=0)
    pools = scaler(scales)
    play(pools, (0.0, [due(5)]))
    assert pools.trouble == "", "nothing waits for a GPU"
    play(pools, (5.0, [due(5), due(5, "embed", "gpu")]))
    assert "the workers system/workers-gpu can't be scaled" in pools.trouble
    scales.replicas[GPU] = 0
    play(pools, (10.0, [due(5), due(5, "embed", "gpu")]))
    assert pools.trouble == ""
    assert scales.replicas[GPU] == 1


class Registry:
    """A registry that is away at first."""

    def __init__(self) -> None:
        self.away = True
        self.looks = 0

    def work(self, *, since_s: float) -> Work:
        self.looks += 1
        if self.away:
            raise EnvironmentFailedError("registry failed after 6 tries")
        return Work(backlog=[due(7)], done={})

    def dead_letters(self) -> dict[str, int]:
        return {"decode": 3}


class QuickClock(SystemClock):
    """Sleeps a thousandth of what it is asked to."""

    async def sleep(self, delay_s: float) -> None:
        await super().sleep(delay_s / 1000)


def test_the_watch_outlives_a_registry_that_is_away_and_shows_what_is_due() -> None:
    registry, metrics = Registry(), DataMetrics()

    def value(name: str, **labels: str) -> Any:
        return metrics.registry.get_sample_value(f"polyreme_datahub_{name}", labels)

    async def until_looked(count: int) -> None:
        while registry.looks < count:
            await asyncio.sleep(0.001)

    async def story() -> None:
        task = asyncio.ensure_future(WorkWatch(registry, metrics, QuickClock(), jobs=lambda: {"Waiting": 2}).run())
        await until_looked(3)
        assert value("jobs", state="Waiting") == 2
        assert value("backlog_items", operation="compose") is None
        registry.away = False
        await until_looked(5 + LETTERS_EVERY)
        assert value("backlog_items", operation="compose") == 7
        assert value("dead_letters", operation="decode") == 3
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    asyncio.run(asyncio.wait_for(story(), 30.0))
