"""The simulated cluster does what a real one does, where a seed once showed that it did not."""

from __future__ import annotations

import random

import pytest

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.run import simulate
from polyreme_simulator.world import World


def test_a_node_that_rejoins_ends_its_deleted_pods() -> None:
    """A kubelet that begins lists the pods of its node: one that is being deleted has nothing left that runs."""
    loop = VirtualLoop()
    world = World(loop, random.Random(1), Facts())
    world.add_node("n0", 4)
    resources = {"limits": {labels.RESOURCE_DEVICE: "1"}}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "p", "namespace": "default"},
        "spec": {"nodeName": "n0", "containers": [{"name": "c", "image": "i", "resources": resources}]},
    }
    created = world.store.create(pod)["metadata"]
    ref = ObjectRef(kind="Pod", namespace="default", name="p")
    world.kubelets.sync(ref, created["uid"])
    world.machines.away("n0", dead=False)
    world.store.delete(ref, uid=created["uid"], grace_period_s=30)
    world.machines.remove("n0")
    assert len(list(world.store.records("Pod"))) == 1, "nobody ends what lies on a node that is no more"
    world.machines.add_again("n0", owned=False)
    assert list(world.store.records("Pod")) == []
    loop.close()


def test_an_error_of_an_actor_ends_the_simulation() -> None:
    """asyncio would only log it, and the actor would do nothing from then on."""
    loop = VirtualLoop()

    def fails() -> None:
        raise LookupError("a bug of an actor")

    loop.call_later(1.0, fails)
    with pytest.raises(LookupError, match="a bug of an actor"):
        loop.run_until_complete(loop.create_future())
    loop.close()


def test_an_error_is_a_violation_of_its_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that a campaign names the seed, and continues."""

    async def fails(_: object) -> None:
        raise LookupError("a bug of an actor")

    monkeypatch.setattr("polyreme_simulator.run._Simulation.run", fails)
    (violation,) = simulate(0).violations
    assert "the world continues: LookupError: a bug of an actor (test_actors.py:" in violation
