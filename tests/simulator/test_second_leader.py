"""A leader's pod and its Lease are deleted in one moment, before the status has said that the pods were there."""

from __future__ import annotations

import asyncio
import random

import pytest

from polyreme_api import labels
from polyreme_cluster.port import ObjectRef
from polyreme_operator.controller import run_operator
from polyreme_operator.settings import Settings
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.world import World

STEPS = 40
LONGEST_S = 300.0
LOOK_S = 0.1
NEVER_S = 10_000.0
SPEC = {
    "model": {"preset": "kimi-vl-nano"},
    "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
    "training": {"steps": STEPS, "packsPerStep": 2},
    "workers": {"replicas": 2},
}


@pytest.mark.parametrize("seed", range(3))
def test_no_attempt_is_released_twice_though_the_job_knows_of_no_pod_and_the_lease_is_gone(seed: int) -> None:
    """Pod and Lease come back under their old names, and nothing on the API server tells of the first leader."""
    loop, facts = VirtualLoop(), Facts()
    world = World(loop, random.Random(seed), facts)
    world.faulty = False
    world.add_node("n0", 2)
    metadata = {"name": "j0", "namespace": "default"}
    uid = world.store.create(
        {"apiVersion": labels.API_VERSION, "kind": "TrainingJob", "metadata": metadata, "spec": SPEC}
    )["metadata"]["uid"]
    world.steps[uid], world.training.checkpoint_every[uid] = STEPS, 5
    lease = ObjectRef(kind="Lease", namespace="default", name=labels.job_object_name("j0", uid))
    pod = ObjectRef(kind="Pod", namespace="default", name=labels.pod_name("j0", uid, index=0, replacement=0))

    async def until(holds: object) -> None:
        assert callable(holds)
        async with asyncio.timeout(LONGEST_S):
            while not holds():
                await asyncio.sleep(LOOK_S)

    async def run() -> None:
        # Words that only tell are held back, as they are when there are many: how many pods there are is one of them.
        settings = Settings(informational_after_s=NEVER_S)
        entropy = random.Random(seed).randbytes
        operator = loop.create_task(
            run_operator(world.cluster, world.clock, settings=settings, rng=random.Random(seed), entropy=entropy)
        )
        await until(lambda: (uid, 1) in world.gangs and world.gangs[uid, 1].step > 2)
        assert not world.store.get(ObjectRef(kind="TrainingJob", **metadata))["status"].get("replicas")
        for ref in (pod, lease):
            world.store.delete(ref, uid=world.store.get(ref)["metadata"]["uid"], grace_period_s=0)
        await until(lambda: facts.job_facts.succeeded)
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)

    loop.run_until_complete(run())
    loop.close()
    assert facts.violations == []
    assert len(facts.attempts) > 1
