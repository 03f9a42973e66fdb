"""Writes side by side, and what becomes of them when their sender is cancelled."""

import asyncio
import gc

import pytest

from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.cached_cluster import CachedCluster
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.job_objects import JobObjects
from polyreme_operator.types.job_keys import JobKeys
from polyreme_operator.types.observer import Observer
from polyreme_operator.writer import Writer
from polyreme_simulator.event_loop import SimClock, VirtualLoop


@pytest.mark.parametrize("looks", [1, 2])
def test_cancellation_closes_the_writes_that_have_not_started(looks: int) -> None:
    loop, began = VirtualLoop(), list[int]()
    clock = SimClock(loop)
    port = EmbeddedCluster(Store(new_uid=lambda: "uid", now_s=clock.now_s))
    cluster = CachedCluster(port, clock, ClusterCache(), lambda changes: None)
    writer = Writer(cluster, JobObjects(cluster, JobKeys()), 1, emit=lambda event: None, observer=Observer())

    async def write(number: int) -> None:
        began.append(number)
        await asyncio.sleep(1.0)

    async def story() -> None:
        task = asyncio.ensure_future(writer.side_by_side([write(number) for number in range(3)]))
        for _ in range(looks):
            await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert task.cancelled()

    loop.run_until_complete(story())
    loop.close()
    assert len(began) == looks - 1
    gc.collect()  # a coroutine that was never awaited warns here, and a warning fails the test
