"""Queues: quota, borrowing and reclaim, shares, order, backfill, stopping; what is not in order loses nothing."""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import Manifest, ObjectRef
from tests.cluster.stage import Stage, condition_of, play

AT_ONCE = {"cooldownSeconds": 0}
APART_S = 1.1
"""Jobs of one second are of one age."""


def used(status: Manifest, resource: str) -> tuple[int, int]:
    """Return what a queue uses of a resource, and what of it is borrowed."""
    return next(
        ((entry["used"], entry["borrowed"]) for entry in status.get("usage") or () if entry["resource"] == resource),
        (0, 0),
    )


def test_a_quota_holds_and_the_queue_reports_pending_jobs_with_reasons(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=8)
        queue = await stage.queue(nominal=2)
        await stage.job("first", 2)
        await stage.until_trains("first")
        await stage.job("second", 2)
        await asyncio.sleep(APART_S)
        await stage.job("third", 1)
        await asyncio.sleep(APART_S)
        await stage.job("urgent", 1, priority=5)
        words = f"needs 2 of {stage.resource}; queue {queue} has 0 left: it holds 2, its quota is 2"
        await stage.until_waits("second", "ExceedsQuota", words)
        status = await stage.until_queue("q", lambda seen: len(seen.get("head") or ()) == 3, "three wait")
        assert [(entry["position"], entry["name"]) for entry in status["head"]] == [
            (1, "urgent"),
            (2, "second"),
            (3, "third"),
        ]
        assert {entry["reason"] for entry in status["head"]} == {"ExceedsQuota"}
        assert (status["pending"], status["admitted"], used(status, stage.resource)) == (3, 1, (2, 0))
        assert condition_of(status, "Ready")[:2] == ("True", "Ready")
        assert await stage.running() == {"first"}
        shown = (await stage.kubectl("get", "tq", queue)).splitlines()
        assert shown[0].split()[0] == "NAME"
        assert {"3", "1"} <= set(shown[1].split())
        await stage.change_queue("q", quotas=[{"resource": stage.resource, "nominal": 6}])
        await stage.until_running({"first", "second", "third", "urgent"})

    play(operated, story)


def test_what_lies_idle_in_the_cohort_is_borrowed_up_to_the_limit_and_taken_back(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=8)
        await stage.queue("cohort")
        limited = {"resource": stage.resource, "nominal": 2, "borrowingLimit": 1}
        await stage.queue("a", parent="cohort", quotas=[limited], preemption=AT_ONCE)
        await stage.queue("b", parent="cohort", nominal=2, preemption=AT_ONCE)
        for at in range(4):
            await stage.job(f"a{at}", queue="a")
        status = await stage.until_queue("a", lambda seen: used(seen, stage.resource) == (3, 1), "it borrows one")
        assert (status["admitted"], status["pending"]) == (3, 1)
        own = {"resource": stage.resource, "nominal": 2}
        await stage.change_queue("a", quotas=[own])
        await stage.until_running({f"a{at}" for at in range(4)})
        for at in range(4):
            await stage.until_trains(f"a{at}")
        await stage.job("b0", 2, queue="b")
        await stage.until_trains("b0")
        running = await stage.running()
        assert len(running - {"b0"}) == 2
        (first, second) = sorted({f"a{at}" for at in range(4)} - running)
        for name in (first, second):
            state, reason, message = await stage.condition(name, "Preempted")
            assert (state, reason) == ("True", "Reclaimed")
            assert f"preempted by {stage.namespace}/b0" in message
            assert (await stage.status(name))["lastCheckpoint"]["step"] == stage.hollow.stopped_at_step[name]
        await stage.until_waits(first, "ExceedsQuota")
        # No quota may be broken for a third time: what b took back, a can't take.
        await stage.stays(_running_are(stage, running), "who runs")

    play(operated, story)


def _running_are(stage: Stage, names: set[str]) -> Callable[[], Coroutine[Any, Any, bool]]:
    async def look() -> bool:
        return await stage.running() == names

    return look


def test_queues_of_one_cohort_share_by_weight(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=8)
        quota = [{"resource": stage.resource, "nominal": 4}]
        await stage.queue("cohort", quotas=quota, stopPolicy="Hold")
        await stage.queue("light", parent="cohort", weight=1, fairSharing={"halfLifeSeconds": 0})
        await stage.queue("heavy", parent="cohort", weight=3, fairSharing={"halfLifeSeconds": 0})
        for at in range(4):
            await stage.job(f"light{at}", queue="light")
        await asyncio.sleep(APART_S)
        for at in range(4):
            await stage.job(f"heavy{at}", queue="heavy")
        await stage.until_queue("heavy", lambda seen: seen.get("pending") == 4, "four wait")
        await stage.until_queue("light", lambda seen: seen.get("pending") == 4, "four wait")
        await stage.change_queue("cohort", stopPolicy="None")
        await stage.until_queue("heavy", lambda seen: seen.get("admitted") == 3, "it has three of four")
        await stage.until_queue("light", lambda seen: seen.get("admitted") == 1, "it has one of four")
        status = await stage.until_queue("cohort", lambda seen: used(seen, stage.resource)[0] == 4, "all is used")
        assert used(status, stage.resource) == (4, 0)

    play(operated, story)


@pytest.mark.parametrize(("aging_s", "first"), [(0, "high"), (1, "low")])
def test_waiting_is_worth_priority_where_the_queue_says_so(operated: str, aging_s: int, first: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n")
        await stage.queue(stopPolicy="Hold", agingSeconds=aging_s, preemption={"withinQueue": "Never"})
        await stage.job("low")
        await asyncio.sleep(4 * APART_S)
        await stage.job("high", priority=2)
        await stage.until_queue("q", lambda seen: seen.get("pending") == 2, "both wait")
        await stage.change_queue("q", stopPolicy="None")
        await stage.until_running({first})
        await stage.stays(_running_are(stage, {first}), "one of them runs")

    play(operated, story)


def test_a_priority_class_goes_before_a_number(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n")
        await stage.queue(stopPolicy="Hold")
        name = stage.name("urgent")
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        await stage.create({**kind, "value": 1000})
        await stage.job("number", priority=500)
        await stage.job("named", priorityClassName=name)
        status = await stage.until_queue("q", lambda seen: len(seen.get("head") or ()) == 2, "both wait")
        assert [(entry["name"], entry["priority"]) for entry in status["head"]] == [("named", 1000), ("number", 500)]
        await stage.change_queue("q", stopPolicy="None")
        await stage.until_running({"named"})
        assert (await stage.status("named"))["priority"] == 1000

    play(operated, story)


def test_a_missing_priority_class_is_said_and_heals_when_it_is_made(operated: str) -> None:
    async def story(stage: Stage) -> None:
        node = await stage.node("n")
        await stage.queue(preemption=AT_ONCE)
        name = stage.name("urgent")
        await stage.job("number", priority=500)
        await stage.until_trains("number")
        await stage.job("named", priorityClassName=name, priority=7)

        def missing(status: Manifest) -> bool:
            return condition_of(status, "PriorityClassMissing")[:2] == ("True", "NotFound")

        status = await stage.until_job("named", missing, "says that its class is missing")
        words = f"there is no PriorityClass {name}; spec.priority 7 applies until it exists; create it"
        to_change = f"{words} or change spec.priorityClassName"
        assert condition_of(status, "PriorityClassMissing")[2] == to_change
        await stage.until_waits("named", "WaitingForCapacity")
        assert await stage.running() == {"number"}
        kind = {"apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass", "metadata": {"name": name}}
        await stage.create({**kind, "value": 1000})
        status = await stage.until_trains("named")
        assert (status["priority"], condition_of(status, "PriorityClassMissing")[0]) == (1000, "")
        assert (await stage.condition("number", "Preempted"))[0] == "True"
        # The class goes, and is reported as missing on a running job, too; a job without one gets no report.
        await stage.delete(ObjectRef(kind="PriorityClass", name=name))
        # Once it is preempted, which may come first, the sentence names the field that could be changed, too.
        await stage.until_job(
            "named",
            lambda status: condition_of(status, "PriorityClassMissing")[2] in {words, to_change},
            "says that its class is missing",
        )
        assert (await stage.condition("number", "PriorityClassMissing"))[0] == ""
        assert {pod["spec"]["nodeName"] for pod in await stage.pods("named")} <= {node}

    play(operated, story)


def test_jobs_of_one_second_go_in_the_order_in_which_they_came(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n")
        await stage.queue(stopPolicy="Hold")
        names = [f"{word}{at}" for at in range(12) for word in "zma"]
        made = [await stage.job(name) for name in names]
        ages = [job["metadata"]["creationTimestamp"] for job in made]
        assert len(set(ages)) < len(ages), "some are of one second"
        status = await stage.until_queue("q", lambda seen: len(seen.get("head") or ()) == len(names), "all wait")
        assert [entry["name"] for entry in status["head"]] == names
        # What came first is written down: neither a change of the job nor another operator forgets it.
        told = [await stage.until_job(name, lambda seen: "arrival" in seen, "says when it came") for name in names]
        came = [int(status["arrival"]) for status in told]
        assert came == [int(job["metadata"]["resourceVersion"]) for job in made]
        await stage.change(stage.ref("z0"), {"metadata": {"labels": {"changed": "yes"}}})
        await stage.change_queue("q", stopPolicy="None")
        await stage.until_running({"z0"})
        await stage.end("z0")
        await stage.until_running({"m0"})
        assert (await stage.status("m0"))["arrival"] == came[1]

    play(operated, story)


def test_backfill_admits_jobs_that_end_before_the_head_could_start(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue(preemption=AT_ONCE)
        await stage.job("runs", 3, activeDeadlineSeconds=3600)
        await stage.until_trains("runs")
        await stage.job("head", 4)
        await stage.until_waits("head", "WaitingForCapacity", "needs 4 devices; room for 1")
        before = f"would delay {stage.namespace}/head"
        await stage.job("endless")
        await stage.until_waits("endless", "BehindOthers", before)
        await stage.job("late", activeDeadlineSeconds=7200)
        await stage.until_waits("late", "BehindOthers", before)
        await stage.job("brief", activeDeadlineSeconds=4)
        await stage.until_job("brief", lambda seen: condition_of(seen, "Admitted")[0] != "", "is admitted")
        status = await stage.until_job("brief", lambda seen: condition_of(seen, "Failed")[0] == "True", "ends")
        assert condition_of(status, "Failed")[1] == "DeadlineExceeded"
        assert (await stage.condition("head", "Queued"))[0] == "True"
        assert await stage.running() == {"runs"}
        await stage.end("runs")
        await stage.until_trains("head")
        assert await stage.running() == {"head"}
        # No job was preempted: the one that filled the room was gone.
        assert "preemption" not in await stage.status("brief")
        await stage.until_waits("endless", "WaitingForCapacity")

    play(operated, story)


def test_small_jobs_fill_what_is_held_for_the_head_only_if_it_can_take_it_back(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue(preemption=AT_ONCE)
        await stage.job("runs", 3, priority=5)
        await stage.until_trains("runs")
        await stage.job("head", 4, priority=5)
        await stage.until_waits("head", "WaitingForCapacity")
        await asyncio.sleep(APART_S)
        await stage.job("equal", 1, priority=5)
        await stage.until_waits("equal", "BehindOthers", f"would delay {stage.namespace}/head")
        await stage.job("filler", 1, priority=4)
        await stage.until_trains("filler")
        await stage.end("runs")
        await stage.until_trains("head")
        assert (await stage.condition("filler", "Preempted"))[:2] == ("True", "Preempted")
        assert await stage.running() == {"head"}

    play(operated, story)


def test_without_backfill_no_job_passes_the_head(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue(backfill={"mode": "Off"}, preemption=AT_ONCE)
        await stage.job("runs", 3, priority=5)
        await stage.until_trains("runs")
        await stage.job("head", 4, priority=5)
        await stage.until_waits("head", "WaitingForCapacity")
        await stage.job("filler", 1, priority=4)
        await stage.until_waits("filler", "BehindOthers")
        await stage.change_queue("q", backfill={"mode": "Conservative"})
        await stage.until_trains("filler")

    play(operated, story)


def test_a_held_queue_admits_no_job_and_a_draining_one_lets_jobs_checkpoint(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        queue = await stage.queue()
        await stage.job("runs")
        await stage.until_trains("runs")
        await stage.change_queue("q", stopPolicy="Hold")
        await stage.job("comes")
        await stage.until_waits("comes", "QueueStopped", f"queue {queue} admits nothing: its stopPolicy is Hold")
        await stage.stays(_running_are(stage, {"runs"}), "what runs goes on")
        await stage.change_queue("q", stopPolicy="HoldAndDrain")
        await stage.until_running(set())
        status = await stage.status("runs")
        assert condition_of(status, "Preempted")[1] == "QueueStopped"
        assert status["lastCheckpoint"]["step"] == stage.hollow.stopped_at_step["runs"]
        assert not status.get("preemptionCount")
        await stage.change_queue("q", stopPolicy="None")
        await stage.until_trains("runs", attempt=2)
        await stage.until_trains("comes")
        assert stage.hollow.said["runs"].resumed_from_step == stage.hollow.stopped_at_step["runs"]

    play(operated, story)


def test_a_queue_that_is_not_there_or_goes_away_loses_no_job(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        queue = stage.name("q")
        await stage.job("early")
        await stage.until_waits("early", "QueueMissing", f"there is no TrainingQueue {queue}")
        await stage.queue()
        await stage.until_trains("early")
        await stage.delete(ObjectRef(kind=labels.KIND_QUEUE, name=queue))
        await stage.job("late")
        await stage.until_waits("late", "QueueMissing", f"there is no TrainingQueue {queue}")
        await stage.stays(_running_are(stage, {"early"}), "what runs goes on")
        assert (await stage.status("early"))["attempt"]["number"] == 1
        await stage.queue()
        await stage.until_trains("late")

    play(operated, story)


def test_queues_in_a_circle_or_without_their_parent_say_so_and_lose_no_job(operated: str) -> None:
    async def story(stage: Stage) -> None:
        await stage.node("n", devices=4)
        await stage.queue("a")
        await stage.queue("b", parent="a")
        await stage.job("runs", queue="b")
        await stage.until_trains("runs")
        await stage.change_queue("a", parent=stage.name("b"))
        for word in ("a", "b"):
            status = await stage.until_queue(
                word, lambda seen: condition_of(seen, "Ready")[:2] == ("False", "Cycle"), "it says Cycle"
            )
            assert "change spec.parent of one of them" in condition_of(status, "Ready")[2]
        await stage.job("waits", queue="b")
        await stage.until_waits("waits", "QueueMissing", "form a cycle")
        assert await stage.running() == {"runs"}
        await stage.change_queue("a", parent=stage.name("nobody"))
        status = await stage.until_queue(
            "b", lambda seen: condition_of(seen, "Ready")[:2] == ("False", "ParentMissing"), "it says ParentMissing"
        )
        await stage.until_waits("waits", "QueueMissing", f"{stage.name('nobody')}, and there is no such queue")
        await stage.queue("nobody")
        await stage.until_trains("waits")
        status = await stage.until_queue("b", lambda seen: condition_of(seen, "Ready")[0] == "True", "it is in order")
        assert used(status, stage.resource)[0] == 2
        assert (await stage.status("runs"))["attempt"]["number"] == 1

    play(operated, story)
