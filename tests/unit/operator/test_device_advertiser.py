"""Devices that are offered on nodes without any."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from polyreme_cluster.port import ClusterPort, Manifest, ObjectRef, PortTimeoutError
from polyreme_operator.device_advertiser import EVERY_S, RESOURCE, advertise, main, offer
from tests.contract.adapters import open_in_memory


def node(name: str, **capacity: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name},
        "status": {"capacity": {"cpu": "2", **capacity}, "allocatable": {"cpu": "2", **capacity}},
    }


async def offers(cluster: ClusterPort, name: str) -> tuple[Any, Any]:
    status = (await cluster.get(ObjectRef(kind="Node", name=name)))["status"]
    assert status["capacity"]["cpu"] == "2"
    return status["capacity"].get(RESOURCE), status["allocatable"].get(RESOURCE)


async def test_only_nodes_without_devices_get_some(tmp_path: Path) -> None:
    async with open_in_memory(tmp_path) as harness:
        cluster = harness.cluster
        for manifest in (node("bare"), node("owner", **{RESOURCE: "8"}), node("replaced", **{RESOURCE: "0"})):
            await cluster.create(manifest)
        assert await offer(cluster, resource=RESOURCE, per_node=4) == ["bare", "replaced"]
        assert [await offers(cluster, name) for name in ("bare", "owner", "replaced")] == [
            ("4", "4"),
            ("8", "8"),
            ("4", "4"),
        ]
        assert await offer(cluster, resource=RESOURCE, per_node=4) == []


class Rounds:
    """A clock that ends the work after some rounds."""

    def __init__(self, rounds: int) -> None:
        self.slept: list[float] = []
        self._rounds = rounds

    def now_s(self) -> float:
        return 0.0

    def steady_s(self) -> float:
        return 0.0

    async def sleep(self, delay_s: float) -> None:
        self.slept.append(delay_s)
        if len(self.slept) == self._rounds:
            raise asyncio.CancelledError


def test_an_outage_delays_the_offer_by_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def story() -> None:
        async with open_in_memory(tmp_path) as harness:
            cluster: Any = harness.cluster
            await cluster.create(node("bare"))
            real, calls = cluster.list, []

            async def fails_once(*arguments: Any, **options: Any) -> Any:
                calls.append(arguments)
                if len(calls) == 1:
                    raise PortTimeoutError("no answer")
                return await real(*arguments, **options)

            monkeypatch.setattr(cluster, "list", fails_once)
            clock = Rounds(2)
            with pytest.raises(asyncio.CancelledError):
                await advertise(cluster, clock, resource=RESOURCE, per_node=2)
            assert clock.slept == [EVERY_S, EVERY_S]
            assert await offers(cluster, "bare") == ("2", "2")

    asyncio.run(story())


@pytest.mark.parametrize("count", ["0", "65", "-1", "many"])
def test_a_wrong_count_is_refused(count: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main([f"--per-node={count}"])
    assert caught.value.code == 2
    assert f"not a count: '{count}', expected 1 to 64" in capsys.readouterr().err
