"""Preemption: victims checkpoint first and keep their place; a deadline, protections and budgets are kept."""

import asyncio

from polyreme_api.times import parse_rfc3339
from tests.cluster.stage import Stage, condition_of, play

AT_ONCE = {"cooldownSeconds": 0}
GRACE_S = 10
"""Long enough that a busy API server is asked several times meanwhile."""


def test_a_victim_checkpoints_keeps_its_place_and_continues_from_that_step(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue(preemption=AT_ONCE)
        await stage.job("low", 2)
        await stage.until_trains("low")
        await asyncio.sleep(1.1)
        await stage.job("later", 2)
        await stage.until_waits("later", "WaitingForCapacity")
        await stage.job("high", 2, priority=10)
        await stage.until_trains("high")
        status = await stage.status("low")
        step = stage.hollow.stopped_at_step["low"]
        assert status["lastCheckpoint"] | {"at": ""} == {"attempt": 1, "step": step, "at": ""}
        assert status["preemption"]["byName"] == f"{stage.namespace}/high"
        assert (status["preemptionCount"], len(status["preemptions"])) == (1, 1)
        assert condition_of(status, "Preempted")[:2] == ("True", "Preempted")
        await stage.until_waits("low", "WaitingForCapacity")
        head = await stage.until_queue("q", lambda seen: len(seen.get("head") or ()) == 2, "two wait")
        assert [entry["name"] for entry in head["head"]] == ["low", "later"]
        stage.hollow.order("high").succeeds = True
        await stage.until_job("high", lambda seen: condition_of(seen, "Succeeded")[0] == "True", "succeeds")
        await stage.end("high")  # its launchers, which only speak, do not end by themselves
        await stage.until_trains("low", attempt=2)
        assert stage.hollow.said["low"].resumed_from_step == step
        assert condition_of(await stage.status("low"), "Preempted")[0] == "False"
        expected = {"Preempting=low", "Preempted=low", "Admitted=low", "Admitted=high"}

        async def told() -> bool:
            events = await stage.kubectl(
                "get", "events", "-o", "jsonpath={range .items[*]}{.reason}={.involvedObject.name} {end}"
            )
            return expected <= set(events.split())

        await stage.until(told, f"events {sorted(expected)}")

    play(operated, story)


def test_a_victim_is_killed_after_its_grace_period(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n")
        await stage.queue(preemption=AT_ONCE)
        await stage.job("stubborn", checkpoint={"preemptionGraceSeconds": GRACE_S})
        stage.hollow.order("stubborn").obeys = False
        await stage.until_trains("stubborn")
        await stage.job("high", priority=10)
        words = f"{stage.namespace}/stubborn"
        await stage.until_waits("high", "WaitingForPreemption", words)
        asked = (await stage.status("stubborn"))["preemption"]
        grace_s = parse_rfc3339(asked["deadline"]) - parse_rfc3339(asked["requestedAt"])
        assert GRACE_S - 0.1 < grace_s < GRACE_S + 0.1
        assert len(await stage.pods("stubborn")) == 1
        await stage.until_trains("high")
        status = await stage.status("stubborn")
        admitted_s = parse_rfc3339((await stage.status("high"))["attempt"]["startedAt"])
        assert admitted_s >= parse_rfc3339(asked["deadline"])
        assert condition_of(status, "Preempted")[:2] == ("True", "Preempted")
        assert status.get("lastCheckpoint") is None
        lost = {entry["cause"]: entry["milliseconds"] for entry in status["accounting"]["lost"]}
        assert lost["Preempted"] > 0

    play(operated, story)


def test_the_one_with_the_newest_checkpoint_is_asked(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=2)
        await stage.queue(preemption=AT_ONCE)
        await stage.job("dear")
        await stage.until_trains("dear")
        await asyncio.sleep(2.0)
        await stage.job("cheap")
        await stage.until_trains("cheap")
        await stage.job("high", priority=10)
        await stage.until_trains("high")
        assert await stage.running() == {"dear", "high"}

    play(operated, story)


def test_preemption_spares_equal_priority_and_the_least_runtime(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=1)
        await stage.queue(preemption=AT_ONCE)
        await stage.job("low", minRuntimeSeconds=3600)
        await stage.until_trains("low")
        await stage.job("high", priority=10)
        await stage.until_waits("high", "WaitingForCapacity")
        await stage.node("more")
        await stage.until_trains("high")
        await stage.job("equal", priority=10)
        await stage.until_waits("equal", "WaitingForCapacity")
        await stage.job("meek", priority=20, preemptionPolicy="Never")
        await stage.until_waits("meek", "WaitingForCapacity")
        assert await stage.running() == {"low", "high"}
        assert (await stage.status("high")).get("preemption") is None

    play(operated, story)


def test_a_job_is_preempted_no_more_often_than_its_queue_allows(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=1)
        await stage.queue(preemption={"cooldownSeconds": 0, "maxPerJob": 1})
        await stage.job("low")
        await stage.until_trains("low")
        await stage.job("first", priority=10)
        await stage.until_trains("first")
        await stage.end("first")
        await stage.until_trains("low", attempt=2)
        await stage.job("second", priority=10)
        await stage.until_waits("second", "WaitingForCapacity")
        assert await stage.running() == {"low"}
        await stage.change_queue("q", preemption={"cooldownSeconds": 0, "maxPerJob": 2})
        await stage.until_trains("second")

    play(operated, story)


def test_the_cheapest_domain_is_cleared_as_a_whole(operated: str) -> None:
    async def story(stage: Stage) -> None:
        big, small = await stage.node("big", devices=4), await stage.node("small", devices=2)
        await stage.queue(preemption=AT_ONCE)
        await stage.job("four", 4, topology={"required": "host"})
        await stage.until_trains("four")
        await stage.job("pair", 2, topology={"required": "host"})
        await stage.until_trains("pair")
        assert {pod["spec"]["nodeName"] for pod in await stage.pods("four")} == {big}
        await stage.job("high", 2, priority=10, topology={"required": "host"})
        await stage.until_trains("high")
        assert {pod["spec"]["nodeName"] for pod in await stage.pods("high")} == {small}
        assert await stage.running() == {"four", "high"}

    play(operated, story)


def test_a_running_job_is_suspended_with_a_checkpoint_and_resumed(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=1)
        await stage.queue()
        await stage.job("rests")
        await stage.until_trains("rests")
        await stage.change(stage.ref("rests"), {"spec": {"suspend": True}})
        await stage.until_job("rests", lambda seen: condition_of(seen, "Suspended")[0] == "True", "is suspended")
        await stage.job("other")
        await stage.until_trains("other")
        await stage.end("other")
        await stage.change(stage.ref("rests"), {"spec": {"suspend": False}})
        await stage.until_trains("rests", attempt=2)
        assert stage.hollow.said["rests"].resumed_from_step == stage.hollow.stopped_at_step["rests"]

    play(operated, story)
