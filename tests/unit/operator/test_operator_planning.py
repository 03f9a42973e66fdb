"""Plans are made once, outside of passes and rounds, and stored in the status of the attempt."""

import asyncio
import json
import os
import signal
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_launcher import job_watch
from polyreme_launcher.job_watch import attempt_view
from polyreme_operator.cache import plan_book
from polyreme_operator.cache.plan_book import PlanBook, plan_sizes
from polyreme_operator.plan_worker import InlinePlanner, ProcessPlanner
from polyreme_operator.types.parse import parse_job_view
from polyreme_operator.types.plans import JobPlans, PlanRequest
from polyreme_planner.plan import Plan
from tests.unit.operator.operator_scenes import job, job_manifest
from tests.unit.operator.operator_stories import Story, play

PLANNING_S = 30.0
ELASTIC = {"replicas": 4, "devices": 1, "minReplicas": 1, "maxReplicas": 12}


class SlowPlanner(InlinePlanner):
    """Takes so long, in virtual time, that an operator that waited for it would be seen to."""

    def __init__(self) -> None:
        self.asked: list[PlanRequest] = []

    async def plan(self, request: PlanRequest) -> JobPlans:
        self.asked.append(request)
        if '"minReplicas"' in request.spec_json:
            await asyncio.sleep(PLANNING_S)
        return plan_sizes(request)


def request(**spec: Any) -> PlanRequest:
    return PlanRequest(json.dumps(job_manifest(**spec)["spec"], sort_keys=True))


def test_reading_a_job_plans_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def planned_here(*_: object, **__: object) -> None:
        raise AssertionError("planned while it was read")

    monkeypatch.setattr(plan_book, "plan_for", planned_here)
    view = parse_job_view(job_manifest(workers=ELASTIC))
    assert (view.plan, view.plans, view.invalid) == (None, (), "")
    assert view.planning is not None


def test_a_job_waits_for_its_plan_while_others_are_admitted() -> None:
    planner = SlowPlanner()

    async def story(story: Story) -> None:
        story.node(devices=16)
        async with story.operator(planner):
            story.job("early")
            await asyncio.sleep(5)
            story.job("elastic", workers=ELASTIC)
            same = story.job("same", workers=ELASTIC)
            await asyncio.sleep(5)
            assert story.admitted("early"), "while the planner was at rest"
            assert story.condition("elastic", "Queued")[:2] == ("True", "Planning")
            assert "layout is being planned" in story.condition("elastic", "Queued")[2]
            await asyncio.sleep(PLANNING_S)
            assert story.admitted("elastic")
            assert story.admitted("same")
            assert same != story.status("elastic").get("uid")
        assert len(planner.asked) == 2, "equal specs are planned once"
        attempt = story.status("elastic")["attempt"]
        plan = Plan.from_json(attempt["plan"])
        assert (plan.replicas, plan.hash) == (attempt["replicas"], attempt["planHash"])

    play(story)


def test_a_new_operator_plans_again_and_leaves_the_attempt_its_plan() -> None:
    async def story(story: Story) -> None:
        story.node(devices=16)
        story.job("elastic", workers=ELASTIC)
        async with story.operator(SlowPlanner()):
            await asyncio.sleep(PLANNING_S + 5)
        before = story.status("elastic")["attempt"]
        async with story.operator(SlowPlanner()):
            await asyncio.sleep(5)
            assert story.status("elastic")["attempt"] == before
            assert story.admitted("elastic"), "a job that runs does not wait for plans of other sizes"

    play(story)


def test_a_planner_that_raises_refuses_that_job_with_the_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan_sizes(request(parallelism={"mode": "Explicit", "dp": 5})).refused.startswith("layout does not fit")

    def broken(*_: object, **__: object) -> Plan:
        raise ZeroDivisionError("division by zero")

    monkeypatch.setattr(plan_book, "plan_for", broken)
    answer = plan_sizes(request())
    assert answer.refused == "planner failed: ZeroDivisionError: division by zero; this is a bug in polyreme"
    assert job(workers={"replicas": 2, "devices": 1}).invalid == answer.refused


def in_process(_: PlanRequest) -> JobPlans:
    return JobPlans(refused=str(os.getpid()))


def never_answers(request: PlanRequest) -> JobPlans:
    while True:
        signal.pause()


def dies(_: PlanRequest) -> JobPlans:
    os._exit(9)


@pytest.mark.slow
def test_the_planner_of_a_cluster_works_in_another_process_and_survives_its_death(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("polyreme_operator.plan_worker.TRIES_MAX", 1)  # each takes a process

    async def answers(planner: ProcessPlanner) -> tuple[JobPlans, JobPlans]:
        try:
            return await planner.plan(request()), await planner.plan(request())
        finally:
            planner.close()

    first, second = asyncio.run(answers(ProcessPlanner(in_process)))
    assert first == second
    assert int(first.refused) != os.getpid()
    assert asyncio.run(answers(ProcessPlanner(dies)))[0].refused == (
        "planner failed: its process exited 1 times without an answer"
    )


@pytest.mark.slow
def test_a_job_that_is_planned_for_too_long_is_refused_and_its_process_ended() -> None:
    async def answer(planner: ProcessPlanner) -> str:
        try:
            return (await planner.plan(request())).refused
        finally:
            planner.close()

    refused = asyncio.run(answer(ProcessPlanner(never_answers, answer_max_s=0.1)))
    assert refused.startswith("planner failed: it found no plan within 0.1 s")


def test_requests_and_answers_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_book, "WANTED_MAX", 2)
    monkeypatch.setattr(plan_book, "ANSWERS_KEPT", 1)
    book, requests = PlanBook(), [PlanRequest(str(number)) for number in range(3)]
    for uid, each in zip("abc", requests, strict=True):
        book.want(each, uid)
    assert book.put(requests[0], JobPlans()) == ({"a"}, {"c"}), "who found no place asks again"
    assert book.next() == requests[1]
    book.put(requests[1], JobPlans())
    assert book.answer(requests[0]) is None
    assert book.answer(requests[1]) == JobPlans()


def with_attempt(**changes: object) -> dict[str, object]:
    plan = job().plan
    assert plan is not None
    attempt = {"number": 3, "planHash": plan.hash, "plan": plan.to_json(), "replicas": 2, "devices": 1, **changes}
    return {**job_manifest(), "status": {"attempt": attempt}}


def test_a_launcher_obeys_the_stored_plan_and_makes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = with_attempt()
    monkeypatch.setattr("polyreme_planner.plan.plan_for", None)
    assert Plan.from_json(attempt_view(manifest).plan_json) == job().plan


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plan": ""}, "plan of attempt 3 is not in the job's status: the operator is older than this launcher"),
        ({"plan": "{}"}, "plan of attempt 3 can't be read: plan is damaged"),
        ({"planHash": "0"}, "plan of attempt 3 is damaged: its hash is"),
    ],
)
def test_a_launcher_refuses_a_plan_that_it_can_not_read(changes: dict[str, str], words: str) -> None:
    manifest = with_attempt(**changes)
    with pytest.raises(InvalidConfigError, match=words):
        attempt_view(manifest)


def test_appended_changes_that_make_a_job_too_long_for_a_message_are_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manifest: dict[str, Any] = {**with_attempt(number=1), "metadata": {**job_manifest()["metadata"], "generation": 1}}
    manifest["spec"]["data"]["schedule"] = [
        {"fromStep": step, "weights": [{"source": "one", "weight": step}]} for step in range(1, 101)
    ]
    whole = attempt_view(manifest)
    size = len(json.dumps([whole.job_json, whole.plan_json]))
    monkeypatch.setattr(job_watch, "LINE_BYTES_MAX", job_watch.HEADROOM_BYTES + size - 1)
    with pytest.raises(InvalidConfigError, match="job and plan are too long for a message to the other launchers"):
        attempt_view(manifest)
    manifest["metadata"]["generation"] = 2
    kept = json.loads(attempt_view(manifest).job_json)["spec"]["data"]["schedule"]
    assert kept == manifest["spec"]["data"]["schedule"][:90]


def test_an_elastic_job_is_planned_at_every_size_whose_ranks_share_the_packs_of_a_step() -> None:
    elastic = {"replicas": 4, "devices": 1, "minReplicas": 1, "maxReplicas": 8}
    view = job(parallelism={"mode": "Explicit", "dp": 2, "tp": 2}, workers=elastic)
    assert sorted(plan.replicas for plan in view.plans) == [2, 4, 6, 8], "12 packs, by 1, 2, 3 and 4 pairs of ranks"
