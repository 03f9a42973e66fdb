"""Replicas that contend for one Lease in virtual time, over an API that answers late, wrongly or never."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from polyreme_api.times import rfc3339
from polyreme_cluster.election import LEASE_NAME, lead
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import Manifest, NotFoundError, ObjectRef, PortTimeoutError, ServerError
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.store import Store
from polyreme_simulator.event_loop import VirtualLoop
from tests.contract.adapters import uids

_Answer = TypeVar("_Answer")
LEASE = ObjectRef(kind="Lease", namespace="polyreme-system", name=LEASE_NAME)


class SkewedClock:
    """A clock that began somewhere else and runs faster or slower than time does."""

    def __init__(self, loop: asyncio.AbstractEventLoop, *, rate: float = 1.0, offset_s: float = 0.0) -> None:
        self._loop, self._rate, self._offset_s = loop, rate, offset_s

    def now_s(self) -> float:
        return 1_700_000_000.0 + self.steady_s()

    def steady_s(self) -> float:
        return self._offset_s + self._rate * self._loop.time()

    async def sleep(self, delay_s: float) -> None:
        await asyncio.sleep(delay_s / self._rate)


class Weather:
    """How the API behaves towards one replica."""

    def __init__(self, *, down: bool = False, fault: float = 0.0, slow: float = 0.0, answer_s: float = 0.0) -> None:
        self.down, self.fault, self.slow, self.answer_s = down, fault, slow, answer_s

    def breaks(self, draw: float) -> bool:
        """Tell whether a call breaks now."""
        return self.down or draw < self.fault


class WeatherPort(ForwardingPort):
    """The store, reached by a network: calls travel on their own, so what a caller gave up may still land."""

    def __init__(self, store: Store, weather: Weather, rng: random.Random) -> None:
        super().__init__(EmbeddedCluster(store))
        self._weather, self._rng = weather, rng
        self._travelling: set[asyncio.Task[Any]] = set()
        self.writes = 0

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        self.writes += call.body is not None
        assert call.verb != "patch" or call.resource_version is not None
        task = asyncio.ensure_future(self._answer(act))
        self._travelling.add(task)
        task.add_done_callback(self._travelling.discard)
        task.add_done_callback(_heard)
        return await asyncio.shield(task)

    async def _answer(self, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        weather, rng = self._weather, self._rng
        await asyncio.sleep(rng.random() * (25.0 if rng.random() < weather.slow else 0.1))
        if weather.breaks(2 * rng.random()):
            raise ServerError("the API server is down")
        result = await act()
        await asyncio.sleep(weather.answer_s)
        await asyncio.sleep(rng.random() * (25.0 if rng.random() < weather.slow else 0.1))
        if weather.breaks(rng.random()):
            raise PortTimeoutError("no answer")
        return result


def _heard(task: asyncio.Task[Any]) -> None:
    """Ignore an error whose caller has moved on."""
    if not task.cancelled():
        task.exception()


class Contest:
    """Replicas and what they did: who led from when to when, in true time."""

    def __init__(self, loop: VirtualLoop) -> None:
        self.loop = loop
        self.store = Store(new_uid=uids(), now_s=lambda: 1_700_000_000.0 + loop.time())
        self.leading: list[str] = []
        self.terms: list[tuple[str, float, float]] = []
        self.together: list[tuple[str, ...]] = []

    def replica(
        self,
        name: str,
        *,
        weather: Weather | None = None,
        rate: float = 1.0,
        offset_s: float = 0.0,
        seed: int = 0,
        work: Callable[[], Coroutine[Any, Any, None]] | None = None,
    ) -> asyncio.Task[None]:
        """Start one."""
        rng = random.Random(f"{name} {seed}")
        port = WeatherPort(self.store, weather or Weather(), rng)
        clock = SkewedClock(self.loop, rate=rate, offset_s=offset_s)

        async def run(_: Callable[[], bool]) -> None:
            began_s = self.loop.time()
            self.leading.append(name)
            if len(self.leading) > 1:
                self.together.append(tuple(self.leading))
            try:
                await (asyncio.Event().wait() if work is None else work())
            finally:
                self.leading.remove(name)
                self.terms.append((name, began_s, self.loop.time()))

        return self.loop.create_task(
            lead(port, clock, identity=name, namespace=LEASE.namespace, rng=rng, run=run), name=name
        )

    @property
    def spec(self) -> Manifest:
        """What the Lease says."""
        spec: Manifest = self.store.get(LEASE)["spec"]
        return spec

    def exists(self) -> bool:
        """Tell whether there is a Lease."""
        try:
            self.store.get(LEASE)
        except NotFoundError:
            return False
        return True

    def take(self, holder: str, *, at_s: float | None = None) -> None:
        """Write the Lease as a stranger."""
        now = rfc3339(1_700_000_000.0 + (self.loop.time() if at_s is None else at_s))
        spec = {"holderIdentity": holder, "leaseDurationSeconds": 15, "renewTime": now, "leaseTransitions": 3}
        if self.exists():
            self.store.patch(LEASE, {"spec": spec})
        else:
            metadata = {"name": LEASE.name, "namespace": LEASE.namespace}
            self.store.create(
                {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": metadata, "spec": spec}
            )


def in_virtual_time(story: Callable[[Contest], Coroutine[Any, Any, None]]) -> Contest:
    """Tell a story; what still runs at its end is cancelled."""
    loop = VirtualLoop()
    asyncio.set_event_loop(loop)
    contest = Contest(loop)

    async def told() -> None:
        try:
            await story(contest)
        finally:
            while others := asyncio.all_tasks() - {asyncio.current_task()}:
                for task in others:
                    task.cancel()
                await asyncio.gather(*others, return_exceptions=True)

    try:
        loop.run_until_complete(told())
    finally:
        asyncio.set_event_loop(None)
        loop.close()
    return contest
