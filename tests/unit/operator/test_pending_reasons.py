"""Pending reasons by rounds that meet a bound, and how many rounds follow."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import TypeVar

from polyreme_api import labels
from polyreme_cluster.forwarding_port import Call, ForwardingPort
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_operator.cache.jobs import JobIndex
from polyreme_operator.cache.nodes import NodeTable
from polyreme_operator.cache.usage import UsageLedger
from polyreme_operator.controller import run_operator
from polyreme_operator.publishing.pending_reasons import PendingReasons
from polyreme_operator.queueing.tree import QueueTree
from polyreme_operator.scheduler import Batch
from polyreme_operator.settings import Settings
from polyreme_operator.types.observer import CycleReport, Observer
from polyreme_operator.types.reasons import Reason
from polyreme_operator.types.snapshot import Pending
from polyreme_simulator.event_loop import VirtualLoop
from polyreme_simulator.invariants import Facts
from polyreme_simulator.scenario import RACK, topology_manifest
from polyreme_simulator.waiting import FOLLOWS_S
from polyreme_simulator.world import World
from tests.unit.operator.operator_scenes import DEVICE, NOW_S, job

_Answer = TypeVar("_Answer")
QUIET_S = 20.0
"""Less than until victims are sought again."""
ROUNDS_MAX = 2
ENDLESS = 1_000_000
LISTS_S = 30.0
STANDING_S = 2.0
FOUR_WIDE = {"steps": 10, "packsPerStep": 4}
QUEUES = ("a", "b", "c", "d")
TREE = QueueTree.of(())
STOPS = Pending(Reason.WAITING_FOR_PREEMPTION, "waits for default/past to stop")
FULL = Pending(Reason.WAITING_FOR_CAPACITY, "needs 2 devices; room for 0 on 0 nodes")


def test_a_round_that_meets_a_bound_takes_back_what_no_longer_holds_and_leaves_what_it_did_not_look_at() -> None:
    index = JobIndex(UsageLedger(NodeTable()))
    jobs = (job("seen", replicas=2), job("unseen", replicas=3))
    for each in jobs:
        index.put(each)
    told = PendingReasons(index)
    kind = index.waiting["uid-seen"].kind
    words = dict.fromkeys(("uid-seen", "uid-unseen"), STOPS)
    told.take(Batch(pending=words, kinds={kind: FULL}), tree=TREE, now_s=NOW_S)
    changed = told.take(Batch(kinds={kind: FULL}, again=True), tree=TREE, now_s=NOW_S + 1)
    assert changed == {"uid-seen"}
    assert [told.pending(each, tree=TREE, now_s=NOW_S + 1) for each in jobs] == [FULL, STOPS]


class CountedRounds(Observer):
    def __init__(self) -> None:
        self.count = 0

    def on_cycle_finished(self, seen: CycleReport) -> None:
        self.count += 1


def submit(world: World, job: Manifest) -> None:
    """Store a job whose gang, once it is released, trains for longer than any story lasts."""
    uid = world.store.create(job)["metadata"]["uid"]
    world.steps[uid] = world.training.checkpoint_every[uid] = ENDLESS


def test_jobs_without_victims_each_get_a_search_and_then_cycles_stop() -> None:
    """More queues than a round seeks victims for: rounds continue where the last one ended, and come to an end."""
    loop, rounds = VirtualLoop(), CountedRounds()
    world = World(loop, random.Random(1), Facts())
    world.faulty = False
    world.add_node("n0", 2)
    submit(world, manifest("holds", "default", priority=9))
    for queue in QUEUES:
        spec = {"quotas": [{"resource": DEVICE, "nominal": 4}]}
        kind = {"apiVersion": labels.API_VERSION, "kind": "TrainingQueue"}
        world.store.create({**kind, "metadata": {"name": queue}, "spec": spec})

    async def story() -> None:
        port = EmbeddedCluster(world.store)
        task = asyncio.ensure_future(
            run_operator(port, world.clock, rng=random.Random(1), entropy=bytes, observer=rounds)
        )
        await asyncio.sleep(5.0)
        for queue in QUEUES:
            submit(world, manifest(f"waits-{queue}", queue, priority=1))
        await asyncio.sleep(5.0)
        rounds.count = 0
        await asyncio.sleep(QUIET_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(story())
    loop.close()
    said = [record.manifest["status"]["conditions"] for record in world.store.records("TrainingJob")]
    reasons = [entry["reason"] for conditions in said for entry in conditions if entry["type"] == "Queued"]
    assert reasons.count("WaitingForCapacity") == len(QUEUES)
    assert rounds.count <= ROUNDS_MAX


def test_a_pending_reason_is_updated_when_other_pods_take_the_room() -> None:
    """Nothing came free, so no job needs a placement; but the reason is no longer true."""
    loop = VirtualLoop()
    world = World(loop, random.Random(1), Facts())
    world.faulty = False
    for number in range(2):
        world.add_node(f"n{number}", 2, tags={RACK: f"r{number}"})
    # Nothing is wrong with the request: a third node, out of service, would hold it.
    world.add_node("n2", 4, tags={RACK: "r2"})
    world.store.create(topology_manifest([("rack", RACK)]))
    world.store.patch(ObjectRef(kind="Node", name="n2"), {"spec": {"unschedulable": True}})
    wide = manifest("wide", "default", priority=0)
    wide["spec"] |= {"workers": {"replicas": 4}, "topology": {"required": "rack"}, "training": FOUR_WIDE}
    said: list[str] = []

    async def story() -> None:
        task = asyncio.ensure_future(
            run_operator(EmbeddedCluster(world.store), world.clock, rng=random.Random(1), entropy=bytes)
        )
        submit(world, wide)
        await asyncio.sleep(5.0)
        said.append(reason_of(world))
        world.store.create(others_pod())
        await asyncio.sleep(FOLLOWS_S)
        said.append(reason_of(world))
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(story())
    loop.close()
    assert said == ["WaitingForTopology", "WaitingForCapacity"]


class SlowToList(ForwardingPort):
    """Lists the last kind long after all others."""

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if (call.verb, call.ref.kind) == ("list", "ConfigMap"):
            await asyncio.sleep(LISTS_S)
        return await act()


def test_the_operator_sleeps_while_it_lists_although_something_is_taken() -> None:
    """The loop of virtual time ends a simulation in which an actor is busy without end."""
    loop = VirtualLoop()
    world = World(loop, random.Random(1), Facts())
    world.faulty = False
    world.add_node("n0", 2)
    world.store.create(others_pod())
    submit(world, manifest("waits", "default", priority=0))

    async def story() -> None:
        port = SlowToList(EmbeddedCluster(world.store))
        task = asyncio.ensure_future(run_operator(port, world.clock, rng=random.Random(1), entropy=bytes))
        await asyncio.sleep(LISTS_S + FOLLOWS_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(story())
    loop.close()
    assert reason_of(world) == "WaitingForCapacity"


class SlowStandings(ForwardingPort):
    """Takes its time to report the status of a queue."""

    def __init__(self, world: World) -> None:
        super().__init__(EmbeddedCluster(world.store))
        self.writes = 0

    async def _forward(self, call: Call, act: Callable[[], Awaitable[_Answer]]) -> _Answer:
        if (call.verb, call.ref.kind) == ("patch", "TrainingQueue"):
            self.writes += 1
            await asyncio.sleep(STANDING_S)
        return await act()


def test_how_queues_stand_is_said_the_rarer_the_longer_it_takes_and_said_at_last() -> None:
    loop, settings = VirtualLoop(), Settings()
    world = World(loop, random.Random(1), Facts())
    world.faulty = False
    port = SlowStandings(world)
    kind = {"apiVersion": labels.API_VERSION, "kind": "TrainingQueue"}
    world.store.create({**kind, "metadata": {"name": "a"}, "spec": {}})
    jobs = 100

    async def story() -> None:
        task = asyncio.ensure_future(run_operator(port, world.clock, rng=random.Random(1), entropy=bytes))
        for number in range(jobs):
            submit(world, manifest(f"job-{number}", "a", priority=1))
            await asyncio.sleep(1.0)
        assert 2 < port.writes <= jobs * settings.queue_status_share / STANDING_S + 2
        await asyncio.sleep(settings.queue_status_rest_max_s)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)

    loop.run_until_complete(story())
    loop.close()
    (queue,) = world.store.records("TrainingQueue")
    assert queue.manifest["status"]["pending"] == jobs


def others_pod() -> Manifest:
    limits = {"limits": {DEVICE: "1"}}
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "foreign", "namespace": "others"},
        "spec": {"nodeName": "n0", "containers": [{"name": "c", "image": "i", "resources": limits}]},
    }


def reason_of(world: World) -> str:
    (record,) = world.store.records("TrainingJob")
    return next(str(each["reason"]) for each in record.manifest["status"]["conditions"] if each["type"] == "Queued")


def manifest(name: str, queue: str, *, priority: int) -> Manifest:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sources": [{"name": "a", "dataset": "sample/digits"}], "sequenceTokens": 128},
            "training": {"steps": 10, "packsPerStep": 2},
            "workers": {"replicas": 2},
            "queueName": queue,
            "priority": priority,
        },
    }
