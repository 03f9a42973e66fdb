"""An API server that is away stops nobody: what nobody could hear is no silence of a leader."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest

from polyreme_api import labels
from polyreme_api.progress import ProgressRecord, RankPhase
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_operator.controller import run_operator
from polyreme_operator.forwarding_port import Call, ForwardingPort
from polyreme_operator.port import (
    STATUS_SUBRESOURCE,
    InvalidObjectError,
    Manifest,
    ObjectRef,
    PortError,
    PortTimeoutError,
    WatchEvent,
)
from polyreme_operator.settings import Settings
from polyreme_simulator.event_loop import SimClock, VirtualLoop

Answer = TypeVar("Answer")
REF = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="one")
SILENT_S = 10
AWAY_S = 60.0
POLL_S = 0.5


class Away(ForwardingPort):
    """A cluster that is out of reach for a while."""

    def __init__(self, cluster: EmbeddedCluster, error: PortError) -> None:
        super().__init__(cluster)
        self._error = error
        self.away = False

    async def _forward(self, call: Call, act: Callable[[], Awaitable[Answer]]) -> Answer:
        if self.away:
            raise self._error
        return await act()

    async def watch(self, kind: str, **options: Any) -> AsyncIterator[WatchEvent]:
        events = self._port.watch(kind, **options)
        step: asyncio.Future[WatchEvent] | None = None
        try:
            while True:
                step = asyncio.ensure_future(anext(events))
                while not step.done():
                    await asyncio.wait({step}, timeout=POLL_S)
                    if self.away:
                        raise self._error
                yield step.result()
        finally:
            if step is not None:
                step.cancel()
                await asyncio.gather(step, return_exceptions=True)


@pytest.mark.parametrize("error", [PortTimeoutError("nobody answers"), InvalidObjectError("403 Forbidden")], ids=str)
@pytest.mark.parametrize(("leader_lives", "attempts"), [(True, 1), (False, 2)])
def test_only_a_leader_that_stays_silent_when_it_can_be_heard_again_costs_an_attempt(
    leader_lives: bool, attempts: int, error: PortError
) -> None:
    virtual = VirtualLoop()
    clock = SimClock(virtual)
    numbers = iter(range(1000))
    store = Store(new_uid=lambda: f"{next(numbers):08x}-0000", now_s=clock.now_s)
    cluster = EmbeddedCluster(store)
    port = Away(cluster, error)

    async def story() -> None:
        store.create(node())
        job = store.create(manifest())
        operator = run_operator(port, clock, settings=Settings(retry_max_s=1.0), rng=random.Random(1), entropy=bytes)
        task = asyncio.ensure_future(operator)
        lease = ObjectRef(kind="Lease", namespace="default", name=labels.job_object_name("one", job["metadata"]["uid"]))
        await asyncio.sleep(2.0)
        for record in store.records("Pod"):
            ref = ObjectRef.of(record.manifest)
            await cluster.patch(ref, {"status": {"phase": "Running"}}, subresource=STATUS_SUBRESOURCE)
        for step in range(1, 6):
            await say(cluster, lease, step, clock)
            await asyncio.sleep(2.0)
        port.away = True
        await asyncio.sleep(AWAY_S)
        port.away = False
        await asyncio.sleep(SILENT_S / 2)
        for step in range(6, 30):
            if leader_lives:
                await say(cluster, lease, step, clock)
            await asyncio.sleep(2.0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    virtual.run_until_complete(story())
    virtual.run_until_complete(virtual.shutdown_asyncgens())
    virtual.close()
    assert store.get(REF)["status"]["attempt"]["number"] == attempts


async def say(cluster: EmbeddedCluster, lease: ObjectRef, step: int, clock: SimClock) -> None:
    record = ProgressRecord(
        attempt=1,
        phase=RankPhase.TRAINING,
        step=step,
        steps=1000,
        joined=1,
        released=True,
        updated_at_s=clock.now_s(),
    )
    annotations = {labels.ANNOTATION_PROGRESS: record.model_dump_json(by_alias=True)}
    await cluster.patch(lease, {"metadata": {"annotations": annotations}})


def node() -> Manifest:
    capacity = {labels.RESOURCE_DEVICE: "1"}
    ready = {"type": "Ready", "status": "True"}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": "n0"},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }


def manifest() -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": "one", "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 1000, "packsPerStep": 2},
            "health": {"heartbeatTimeoutSeconds": SILENT_S},
        },
    }
