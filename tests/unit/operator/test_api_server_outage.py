"""An API server that is away stops no job: what could not be heard is no silence of a leader."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, TypeVar

import pytest

from polyreme_api import labels
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import (
    ClusterPort,
    InvalidObjectError,
    ObjectRef,
    PortError,
    PortTimeoutError,
    WatchEvent,
)
from polyreme_operator.settings import Settings
from tests.unit.operator.operator_stage import Stage

Answer = TypeVar("Answer")
REF = ObjectRef(kind=labels.KIND_JOB, namespace="default", name="one")
SILENT_S = 10
AWAY_S = 60.0
POLL_S = 0.5


class Away(ForwardingPort):
    """A cluster that is out of reach for a while."""

    def __init__(self, cluster: ClusterPort, error: PortError) -> None:
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
    stage = Stage(Settings(retry_max_s=1.0))
    port = stage.cluster = Away(stage.cluster, error)
    stage.add_nodes(1)
    uid = stage.add_job("one", health={"heartbeatTimeoutSeconds": SILENT_S})

    async def story() -> None:
        await asyncio.sleep(2.0)
        for step in range(1, 6):
            await stage.report("one", uid, attempt=1, phase="Training", step=step)
            await asyncio.sleep(2.0)
        port.away = True
        await asyncio.sleep(AWAY_S)
        port.away = False
        await asyncio.sleep(SILENT_S / 2)
        for step in range(6, 30):
            if leader_lives:
                await stage.report("one", uid, attempt=1, phase="Training", step=step)
            await asyncio.sleep(2.0)

    stage.run(story)
    assert stage.status("one")["attempt"]["number"] == attempts
