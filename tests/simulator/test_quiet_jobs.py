"""What a running job costs the API server: no calls beyond what was asked for."""

from __future__ import annotations

import asyncio
import random
from collections import Counter

import pytest

from polyreme_api import labels
from polyreme_cluster.port import KINDS
from polyreme_local.api_server.record import Change
from polyreme_operator.controller import run_operator
from polyreme_operator.settings import Settings
from polyreme_operator.types.intents import INTENTS_KEY
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.world import World

SETTLED_S = 30.0
WATCHED_S = 60.0
NEVER = 1_000_000


class CountedFacts(Facts):
    """Counts the changes of the store by kind."""

    def __init__(self) -> None:
        super().__init__()
        self.told: Counter[str] = Counter()

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take one change."""
        self.told[change.record.kind] += 1
        super().changed(change, world)


def writes_of_a_running_job(*, checkpoint_every: int) -> Counter[str]:
    """Count the writes of a minute in which a job trains, by kind of object."""
    loop = VirtualLoop()
    facts = CountedFacts()
    world = World(loop, random.Random(1), facts)
    world.faulty = False
    before: Counter[str] = Counter()
    world.add_node("n0", 4)
    job = {
        "apiVersion": labels.API_VERSION,
        "kind": "TrainingJob",
        "metadata": {"name": "j0", "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": NEVER, "packsPerStep": 2},
            "workers": {"replicas": 2},
        },
    }
    uid = world.store.create(job)["metadata"]["uid"]
    world.steps[uid], world.training.checkpoint_every[uid] = NEVER, checkpoint_every

    async def run() -> None:
        entropy = random.Random(2).randbytes
        operator = loop.create_task(
            run_operator(
                world.cluster, world.clock, settings=Settings(relist_s=10.0), rng=random.Random(3), entropy=entropy
            )
        )
        await asyncio.sleep(SETTLED_S)
        before.update(facts.told)
        await asyncio.sleep(WATCHED_S)
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)

    loop.run_until_complete(run())
    loop.close()
    assert facts.violations == []
    return Counter({kind: facts.told[kind] - before[kind] for kind in KINDS})


@pytest.mark.slow
def test_a_job_that_only_trains_is_not_written_at_all() -> None:
    writes = writes_of_a_running_job(checkpoint_every=NEVER)
    assert writes.pop("Lease") > 0, "its leader renews the Lease"
    assert not +writes


@pytest.mark.slow
def test_a_durable_checkpoint_is_one_write() -> None:
    every = 25
    writes = writes_of_a_running_job(checkpoint_every=every)
    assert 0 < writes["TrainingJob"] <= 1 + WATCHED_S / (0.2 * every)


@pytest.mark.slow
def test_a_job_that_starts_at_once_gets_no_pending_reason_and_one_event_for_its_pods() -> None:
    """Its admission, that it runs, its success: no word of a queue, and none for each pod."""
    loop, facts = VirtualLoop(), CountedFacts()
    world = World(loop, random.Random(1), facts)
    world.faulty = False
    world.add_node("n0", 8)
    spec = {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
        "training": {"steps": 2, "packsPerStep": 8},
        "workers": {"replicas": 8},
    }
    metadata = {"name": "j0", "namespace": "default"}
    # As an operator finds it that is not the first of its cluster, and so has no unknown intents to cancel.
    intents = {"name": labels.INTENTS_NAME, "namespace": Settings().namespace}
    world.store.create({"apiVersion": "v1", "kind": "ConfigMap", "metadata": intents, "data": {INTENTS_KEY: "[]"}})
    uid = world.store.create(
        {"apiVersion": labels.API_VERSION, "kind": "TrainingJob", "metadata": metadata, "spec": spec}
    )["metadata"]["uid"]
    world.steps[uid], world.training.checkpoint_every[uid] = 2, NEVER

    async def run() -> None:
        operator = loop.create_task(
            run_operator(world.cluster, world.clock, rng=random.Random(3), entropy=random.Random(2).randbytes)
        )
        await asyncio.sleep(SETTLED_S)
        operator.cancel()
        await asyncio.gather(operator, return_exceptions=True)

    loop.run_until_complete(run())
    loop.close()
    assert facts.violations == []
    (job,) = facts.jobs.values()
    assert job["status"]["completedAt"]
    assert facts.told["TrainingJob"] <= 5, "created, admitted, its pods run, it trains, ended"
