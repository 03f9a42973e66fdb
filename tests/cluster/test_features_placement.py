"""Gangs come where network, templates and other pods leave room: read off the nodes that their pods are bound to."""

import asyncio
from collections import Counter
from collections.abc import Iterator

import pytest

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from tests.cluster.kube import api_client
from tests.cluster.stage import BLOCK, RACK, Stage, condition_of, places, play
from tests.cluster.topologies import default_topology


@pytest.fixture(scope="module", autouse=True)
def topology(operated: str) -> Iterator[None]:
    """Blocks of racks; the operator knows one topology only, so these tests share it."""
    with api_client(operated) as api, default_topology(api, {"block": BLOCK, "rack": RACK}):
        yield


async def until_bound(stage: Stage, job: str, workers: int) -> None:
    async def look() -> bool:
        return sum(bool(pod["spec"].get("nodeName")) for pod in await stage.pods(job)) == workers

    await stage.until(look, f"{job}: {workers} pods are bound")


def test_what_a_limit_range_gives_to_containers_counts_before_they_exist(operated: str) -> None:
    """kube-scheduler refuses none of the pods, and a job that the template says has room waits."""

    async def story(stage: Stage) -> None:
        for word in ("a", "b"):
            await stage.node(word, devices=4, cpu="8")
        await stage.queue()
        limits = [{"type": "Container", "defaultRequest": {"cpu": "6"}}]
        head = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "defaults"}}
        await stage.apply({**head, "spec": {"limits": limits}})

        async def completes() -> bool:
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "probe", "namespace": stage.namespace}}
            containers = [{"name": "c", "image": "none.example/none:1"}]
            made = await stage.cluster.create({**pod, "spec": {"containers": containers, "schedulerName": "none"}})
            await stage.delete(ObjectRef.of(made), grace_s=0)
            return "requests" in made["spec"]["containers"][0]["resources"]

        await stage.until(completes, "the API server completes requests")
        await stage.job("apart", 2)
        status = await stage.until_trains("apart")
        assert sorted(places(status)) == [stage.name("a"), stage.name("b")]
        assert status["attempt"]["number"] == 1
        await stage.job("more")
        await stage.until_waits("more", "WaitingForNodes", "too little cpu")

    play(operated, story)


def test_a_required_level_takes_the_smallest_domain_that_holds_the_gang_and_waits_for_one(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.nodes({"r2": 2, "r3": 3, "r4": 4})
        await stage.queue()
        await stage.job("three", 3, topology={"required": "rack"})
        await until_bound(stage, "three", 3)
        assert await stage.racks("three") == ["r3"] * 3
        await stage.job("four", 4, topology={"required": "rack"})
        await until_bound(stage, "four", 4)
        assert await stage.racks("four") == ["r4"] * 4
        await stage.job("more", 3, topology={"required": "rack"})
        rack = stage.name("r2")
        await stage.until_waits("more", "WaitingForCapacity", "needs 3 devices", "room for 2 on 2 nodes")
        await stage.nodes({"r5": 1})
        await stage.until_waits("more", "WaitingForTopology", "needs 3 nodes in one rack", f"2 free in {rack}")
        await stage.node("third", rack="r2")
        await until_bound(stage, "more", 3)
        assert await stage.racks("more") == ["r2"] * 3

    play(operated, story)


def test_a_preferred_level_is_given_up_for_the_next_wider_one(operated: str) -> None:
    async def story(stage: Stage) -> None:
        for rack, block in (("r1", "far"), ("r2", "near"), ("r3", "near")):
            for at in range(3 if block == "near" else 4):
                await stage.node(f"{at}-{rack}", rack=rack, block=block)
        await stage.queue()
        await stage.job("six", 6, topology={"preferred": "rack"})
        await until_bound(stage, "six", 6)
        assert Counter(await stage.racks("six")) == {"r2": 3, "r3": 3}
        await stage.job("four", 4, topology={"preferred": "rack"})
        await until_bound(stage, "four", 4)
        assert set(await stage.racks("four")) == {"r1"}

    play(operated, story)


def test_slices_stay_whole(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.nodes({"r1": 3, "r2": 3, "r3": 3})
        await stage.queue()
        await stage.job("sliced", 6, topology={"sliceSize": 2, "sliceLevel": "rack"})
        await until_bound(stage, "sliced", 6)
        racks = await stage.racks("sliced")
        assert racks[0::2] == racks[1::2]
        assert set(Counter(racks).values()) == {2}
        await stage.job("next", 2, topology={"sliceSize": 2, "sliceLevel": "rack"})
        await stage.until_waits("next", "WaitingForTopology", "in slices of 2, each in one rack")

    play(operated, story)


def test_an_exclusive_domain_is_not_shared_in_either_direction(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.nodes({"r1": 2, "r2": 3})
        await stage.queue()
        await stage.job("alone", 2, topology={"exclusive": "rack"})
        await until_bound(stage, "alone", 2)
        (taken,) = set(await stage.racks("alone"))
        assert taken == "r1"
        await stage.job("other", 1)
        await until_bound(stage, "other", 1)
        assert await stage.racks("other") == ["r2"]
        # One node of r1 comes beside those two; only the job that holds the rack may use it.
        await stage.node("spare", rack="r1")
        await stage.job("second", 1, topology={"exclusive": "rack"}, priority=1)
        await stage.job("wide", 3)
        for name in ("second", "wide"):
            await stage.until_job(name, lambda status: condition_of(status, "Queued")[0] == "True", "waits")
        await stage.end("other")
        await until_bound(stage, "second", 1)
        assert await stage.racks("second") == ["r2"]
        assert (await stage.condition("wide", "Queued"))[0] == "True"

    play(operated, story)


def test_ranks_that_talk_most_sit_nearest(operated: str) -> None:
    async def story(stage: Stage) -> None:
        # Rank by rank along the racks every pair of experts would be torn: 0 | 1 2 | 3.
        await stage.nodes({"r1": 1, "r2": 2, "r3": 1})
        await stage.queue()
        await stage.job("ranks", 4, parallelism={"mode": "Explicit", "dp": 4, "ep": 2})
        await until_bound(stage, "ranks", 4)
        racks = await stage.racks("ranks")
        assert [racks[0] == racks[1], racks[2] == racks[3]].count(True) == 1
        assert (await stage.status("ranks"))["layout"] == "dp4 ep2"

    play(operated, story)


def test_nodes_of_several_sizes_with_several_devices_a_pod(operated: str) -> None:
    async def story(stage: Stage) -> None:
        names = {await stage.node(f"n{devices}", devices=devices): devices for devices in (8, 5, 2, 1)}
        await stage.queue()
        await stage.job("pairs", 6, workers={"devices": 2})
        await until_bound(stage, "pairs", 6)
        pods = await stage.pods("pairs")
        assert Counter(names[pod["spec"]["nodeName"]] for pod in pods) == {8: 4, 5: 2}
        assert {pod["spec"]["containers"][0]["resources"]["limits"][stage.resource] for pod in pods} == {"2"}
        await stage.job("huge", 1, workers={"devices": 12})
        await stage.until_waits(
            "huge", "Misconfigured", f"a worker needs 12 {stage.resource}", "the largest node has 8"
        )

    play(operated, story)


def test_selectors_taints_and_affinity_of_the_template_count(operated: str) -> None:
    async def story(stage: Stage) -> None:
        taint = {"key": "team", "value": "other", "effect": "NoSchedule"}
        plain = await stage.node("plain", devices=2)
        other = await stage.node("other", devices=2, tags={"pool": "b"})
        tainted = await stage.node("tainted", devices=2, taints=[taint])
        await stage.queue()
        await stage.job("picky", 4, body={"nodeSelector": {"pool": "b"}})
        sentence = await stage.until_waits("picky", "WaitingForNodes", "needs 4 workers; room for 2")
        assert "2 do not bear the labels that the pod template selects" in sentence
        await stage.job("shy", 6)
        await stage.until_waits("shy", "WaitingForNodes", "1 have taints that the pod template does not tolerate")
        for name in ("picky", "shy"):
            await stage.end(name)
        await stage.job("picks", 2, body={"nodeSelector": {"pool": "b"}})
        await until_bound(stage, "picks", 2)
        await stage.job("bears", 2, body={"tolerations": [taint | {"operator": "Equal"}], "nodeSelector": {}})
        term = {"matchExpressions": [{"key": "pool", "operator": "DoesNotExist"}]}
        required = {"requiredDuringSchedulingIgnoredDuringExecution": {"nodeSelectorTerms": [term]}}
        await until_bound(stage, "bears", 2)
        await stage.job("avoids", 2, body={"affinity": {"nodeAffinity": required}})
        assert {pod["spec"]["nodeName"] for pod in await stage.pods("picks")} == {other}
        bears = {pod["spec"]["nodeName"] for pod in await stage.pods("bears")}
        assert bears in ({plain}, {tainted})
        if bears == {plain}:
            await stage.until_waits("avoids", "WaitingForNodes")
        else:
            await until_bound(stage, "avoids", 2)
            assert {pod["spec"]["nodeName"] for pod in await stage.pods("avoids")} == {plain}

    play(operated, story)


def test_pods_of_daemon_sets_and_of_others_take_room(operated: str) -> None:
    async def story(stage: Stage) -> None:
        busy = await stage.node("busy", devices=2, cpu="8")
        free = await stage.node("free", devices=2, cpu="8")
        await stage.queue()
        await stage.daemon_set("agent", busy, {"cpu": "7"})
        await stage.pod("foreign", free, {stage.resource: "1"})
        container = {"name": "main", "image": "none.example/none:1", "resources": {"requests": {"cpu": "1"}}}
        # Two devices are free on ``busy`` but one core only; two cores on ``free`` but one device only.
        await stage.job("three", 3, body={"containers": [container]})
        await stage.until_waits("three", "WaitingForNodes", "room for 2", "have too little cpu left")
        await stage.job("two", 2, body={"containers": [container]})
        await until_bound(stage, "two", 2)
        assert sorted(pod["spec"]["nodeName"] for pod in await stage.pods("two")) == [busy, free]
        await stage.end("two")
        await stage.kubectl("delete", "daemonset", "agent", "--wait=false")
        await until_bound(stage, "three", 3)
        assert Counter(pod["spec"]["nodeName"] for pod in await stage.pods("three")) == {busy: 2, free: 1}

    play(operated, story)


def test_a_cordoned_node_is_not_used_until_it_is_uncordoned(operated: str) -> None:
    async def story(stage: Stage) -> None:
        node = await stage.node("one", devices=2)
        await stage.kubectl("cordon", node)
        await stage.queue()
        await stage.job("waits", 2)
        await stage.until_waits("waits", "WaitingForCapacity", "1 node is out of service")
        await stage.kubectl("uncordon", node)
        await stage.until_trains("waits")

    play(operated, story)


def test_the_topology_counts_its_domains_and_names_what_is_wrong_with_labels(operated: str) -> None:
    async def story(stage: Stage) -> None:
        ref = ObjectRef(kind="ClusterTopology", name="default")

        async def until(word: str, reason: str, *, ready: bool) -> Manifest:
            found: list[Manifest] = []

            async def look() -> bool:
                found[:] = [(await stage.cluster.get(ref)).get("status") or {}]
                state, why, message = condition_of(found[0], "Ready")
                return (state, why) == (str(ready), reason) and word in message

            await stage.until(look, f"the topology is {reason}, {word}: {found}")
            return found[0]

        async def count(level: str) -> int:
            status = (await stage.cluster.get(ref)).get("status") or {}
            counts: dict[str, int] = {entry["level"]: entry["count"] for entry in status.get("domains") or ()}
            return counts.get(level, 0)

        async def settled(racks: int) -> None:
            async def look() -> bool:
                return await count("rack") == racks

            await stage.until(look, f"{racks} racks")

        await asyncio.sleep(1.5)  # what other stories left has been counted
        racks = await count("rack")
        await stage.nodes({"r1": 1, "r2": 2})
        await settled(racks + 2)
        await stage.queue()
        await stage.job("runs", 2, topology={"required": "rack"})
        await stage.until_trains("runs")
        torn = await stage.node("torn", rack="r2", block="elsewhere")
        status = await until(stage.name("r2"), "LabelsDoNotNest", ready=False)
        assert "each is taken as several domains" in condition_of(status, "Ready")[2]
        assert (await stage.condition("runs", "Running"))[0] == "True"
        # The torn rack is two: no gang of three that requires a rack fits, one over racks does.
        await stage.job("rack", 3, topology={"required": "rack"})
        await stage.until_job("rack", lambda seen: condition_of(seen, "Queued")[0] == "True", "waits")
        await stage.end("rack")
        await stage.delete(ObjectRef(kind="Node", name=torn))
        bare = await stage.node("bare", tags={RACK: ""})
        status = await until(RACK, "NodesWithoutLabels", ready=False)
        assert status["unlabelled"] >= 1
        assert bare in status["unlabelledNodes"] or status["unlabelled"] > len(status["unlabelledNodes"])
        await stage.job("two", 2)
        await stage.until_waits("two", "WaitingForCapacity", "needs 2 devices; room for 1")
        await stage.change(ObjectRef(kind="Node", name=bare), {"metadata": {"labels": {RACK: stage.name("r3")}}})
        await stage.until_trains("two")
        assert (await stage.status("runs"))["attempt"]["number"] == 1

    play(operated, story)


def test_without_a_topology_hosts_are_all_there_is(operated: str) -> None:
    async def story(stage: Stage) -> None:
        ref = ObjectRef(kind="ClusterTopology", name="default")
        kept = await stage.cluster.get(ref)
        await stage.nodes({"r1": 2})
        await stage.queue()
        await stage.job("racked", 2, topology={"required": "rack"})
        await stage.until_trains("racked")
        await stage.delete(ref)
        try:
            await stage.job("rack", 1, topology={"required": "rack"})
            await stage.until_waits("rack", "Misconfigured", "rack")
            assert await stage.running() == {"racked"}
        finally:
            again = {"apiVersion": labels.API_VERSION, "kind": "ClusterTopology", "metadata": {"name": "default"}}
            await stage.cluster.create({**again, "spec": kept["spec"]})
        await stage.end("racked")
        await stage.until_trains("rack")

    play(operated, story)
