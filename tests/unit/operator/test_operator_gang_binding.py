"""The loop binds a gang by itself on nodes of its own: every pod once, and the launchers then train."""

import asyncio
import random
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.forwarding_port import ForwardingPort
from polyreme_cluster.port import ClusterPort, ObjectRef
from polyreme_operator.controller import run_operator
from polyreme_operator.reconcile.binding import BindingMode
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from polyreme_operator.types.parse import OWNED_TAINT
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.world import World

WORKERS = 6
SETTLED_S = 30.0


class CountedPort(ForwardingPort):
    """Counts the bindings that reach a cluster."""

    def __init__(self, cluster: ClusterPort) -> None:
        super().__init__(cluster)
        self.bound: list[tuple[str, str]] = []

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        self.bound.append((ref.name, node))
        await super().bind(ref, uid=uid, node=node)


def run(binding: BindingMode) -> tuple[CountedPort, World, list[dict[str, Any]], dict[str, Any]]:
    loop = VirtualLoop()
    world = World(loop, random.Random(1), Facts())
    world.faulty = False
    for name in ("n0", "n1"):
        world.add_node(name, 4)
        taint = {"key": OWNED_TAINT, "effect": "NoSchedule"}
        world.store.patch(ObjectRef(kind="Node", name=name), {"spec": {"taints": [taint]}})
    job = {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "j0", "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 1_000_000, "packsPerStep": WORKERS},
            "workers": {"replicas": WORKERS},
        },
    }
    uid = world.store.create(job)["metadata"]["uid"]
    world.steps[uid], world.training.checkpoint_every[uid] = 1_000_000, 1_000_000
    port = CountedPort(world.cluster)

    async def settle() -> tuple[list[dict[str, Any]], dict[str, Any]]:
        settings = Settings(defaults=PodDefaults(binding=binding))
        entropy = random.Random(2).randbytes
        operator = loop.create_task(
            run_operator(port, world.clock, settings=settings, rng=random.Random(3), entropy=entropy)
        )
        await asyncio.sleep(SETTLED_S)
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)
        pods = list((await world.cluster.list("Pod")).items)
        return pods, await world.cluster.get(ObjectRef(kind="TrainingJob", namespace="default", name="j0"))

    pods, found = loop.run_until_complete(settle())
    loop.close()
    return port, world, pods, found


@pytest.mark.slow
def test_every_pod_is_bound_once_to_its_place_and_the_gang_trains() -> None:
    port, _, pods, job = run("GangBinder")
    assert sorted(name for name, _ in port.bound) == sorted(pod["metadata"]["name"] for pod in pods)
    assert len(pods) == WORKERS
    assert {pod["metadata"]["name"]: pod["spec"]["nodeName"] for pod in pods} == dict(port.bound)
    running = {entry["type"]: entry["status"] for entry in job["status"]["conditions"]}
    assert running["Running"] == "True"


@pytest.mark.slow
def test_nothing_is_bound_where_pods_name_their_node() -> None:
    port, _, pods, _ = run("NodeName")
    assert port.bound == []
    assert all(pod["spec"]["nodeName"] for pod in pods)
