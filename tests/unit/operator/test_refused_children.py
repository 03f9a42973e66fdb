"""A job whose Service, Secret, account, Role or RoleBinding is refused reports it until that object is created."""

import asyncio
from collections.abc import Collection
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef, PortError
from polyreme_operator.reconcile.refusals import RETRY_MAX_S
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.settings import Settings
from tests.unit.operator.operator_stories import NAMESPACE, Story, play

CHILDREN = ("Service", "Secret", "ServiceAccount", "Role", "RoleBinding")
QUOTA = "403 Forbidden, exceeded quota: team, requested: x=1, used: x=5, limited: x=5"
REPORTED_S = 4.0
"""Time within which a refusal is reported."""


def refuse(story: Story, *kinds: str) -> None:
    """Refuse new objects of these kinds from now on, and no others."""

    def review(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
        if verb != "create" or ref.kind not in kinds or ref.namespace != NAMESPACE:
            return None
        return InvalidObjectError(f"create of {ref} refused: {QUOTA}")

    story.cluster.refuses = review


def reported(story: Story, kind: str, name: str = "j") -> bool:
    """Tell whether PodsReady says that the job's object of a kind is refused, and why."""
    message = story.condition(name, "PodsReady")[2]
    return f"refuses the job's {kind}," in message and QUOTA in message


def events(story: Story) -> list[Manifest]:
    return [event for event in story.objects("Event") if event["reason"] == "CreateRefused"]


async def run(story: Story, seconds: float, *, joins: Collection[str] = (), says: str = "") -> None:
    """Let pods run for a while, and launchers join if all of these objects exist; check what is reported meanwhile."""
    until_s = story.clock.now_s() + seconds
    while story.clock.now_s() < until_s:
        await asyncio.sleep(1.0)
        story.runs()
        if joins and all(
            any(each["metadata"]["namespace"] == NAMESPACE for each in story.objects(kind)) for kind in joins
        ):
            (job,) = story.objects(labels.KIND_JOB)
            story.reports("j", job["metadata"]["uid"], step=int(story.clock.now_s()) % 1_000_000)
        assert not says or reported(story, says), story.condition("j", "PodsReady")


@pytest.mark.parametrize("kind", CHILDREN)
def test_a_refused_object_is_reported_until_it_is_created_and_then_the_job_trains(kind: str) -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        refuse(story, kind)
        story.job("j", replicas=2)
        async with story.operator():
            await run(story, REPORTED_S, joins=CHILDREN)
            assert len(story.objects("Pod")) == 2, "its other objects were created beside"
            assert story.condition("j", "PodsReady")[:2] == ("False", "CreateRefused")
            await run(story, 60.0, joins=CHILDREN, says=kind)
            assert [(event["type"], QUOTA in event["message"]) for event in events(story)] == [("Warning", True)]
            refuse(story)
            await run(story, RETRY_MAX_S + REPORTED_S, joins=CHILDREN)
            assert story.condition("j", "PodsReady") == ("True", "Joined", "")
            assert story.condition("j", "Running")[1] == "Training"
            assert story.status("j")["attempt"]["number"] == 1

    play(told)


def test_an_object_that_never_existed_is_reported_although_the_ranks_run() -> None:
    """A gang of one joins without a Service; the first worker that is added could not."""

    async def told(story: Story) -> None:
        story.node(devices=2)
        refuse(story, "Service")
        story.job("j", replicas=1)
        async with story.operator():
            await run(story, REPORTED_S, joins=("Pod",))
            await run(story, 60.0, joins=("Pod",), says="Service")
            assert story.condition("j", "Running")[1] == "Training"
            assert story.condition("j", "PodsReady")[:2] == ("True", "CreateRefused")
            assert len(events(story)) == 1
            refuse(story)
            await run(story, RETRY_MAX_S + REPORTED_S, joins=("Pod",))
            assert story.objects("Service")
            assert story.condition("j", "PodsReady") == ("True", "Joined", "")

    play(told)


def test_each_of_several_refused_objects_is_reported_until_it_is_created() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        refuse(story, "Service", "Secret")
        story.job("j", replicas=2)
        async with story.operator():
            await run(story, REPORTED_S)
            assert reported(story, "Service")
            assert reported(story, "Secret")
            refuse(story, "Secret")
            await run(story, RETRY_MAX_S + REPORTED_S, says="Secret")
            assert story.objects("Service")
            assert not reported(story, "Service")

    play(told)


def test_retries_are_bounded_and_the_job_fails_with_the_refusal() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        refuse(story, "Service")
        story.job("j", replicas=2, failurePolicy={"noProgressMax": 1}, health={"startTimeoutSeconds": 120})
        async with story.operator():
            await run(story, REPORTED_S)
            await run(story, 110.0, says="Service")
            tries = story.cluster.count("create", "Service")
            assert 5 <= tries <= 10
            await run(story, 300.0)
            failed, reason, message = story.condition("j", "Failed")
            assert (failed, reason) == ("True", "NoProgress")
            assert "refuses the job's Service" in message
            assert QUOTA in message
            assert story.cluster.count("create", "Service") <= 3 * tries

    play(told)


def test_a_refusal_outlives_the_attempt_in_which_it_was_met() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        refuse(story, "Service")
        story.job("j", replicas=2, health={"startTimeoutSeconds": 20})
        async with story.operator():
            await run(story, REPORTED_S)
            await run(story, 60.0, says="Service")
            assert story.status("j")["attempt"]["number"] > 1
            refuse(story)
            await run(story, RETRY_MAX_S + REPORTED_S, joins=CHILDREN)
            assert story.condition("j", "PodsReady")[:2] == ("True", "Joined")

    play(told)


def test_a_new_leader_says_nothing_of_a_full_quota_to_a_job_that_trains() -> None:
    """Quota is checked before existence: what the ranks run with is there, whatever the answer is."""

    async def told(story: Story) -> None:
        story.node(devices=2)
        story.job("j", replicas=2)
        async with story.operator():
            await run(story, 10.0, joins=CHILDREN)
        refuse(story, *CHILDREN)
        before = story.cluster.count("create", "Service")
        async with story.operator():
            await run(story, 900.0, joins=CHILDREN)
            assert story.condition("j", "PodsReady") == ("True", "Joined", "")
            assert story.condition("j", "Running")[1] == "Training"
            assert events(story) == []
            assert story.cluster.count("create", "Service") - before < 10

    play(told)


def test_without_a_launcher_a_refusal_is_reported_although_every_pod_runs() -> None:
    """Nothing shows whether the ranks of another framework have met."""

    async def told(story: Story) -> None:
        story.node(devices=2)
        refuse(story, "Service")
        workers: dict[str, Any] = {"replicas": 2, "runtime": {"mode": "Environment"}}
        story.job("j", workers=workers)
        async with story.operator():
            await run(story, REPORTED_S)
            await run(story, 30.0, says="Service")
            assert story.condition("j", "PodsReady")[0] == "True"
            refuse(story)
            await run(story, RETRY_MAX_S + REPORTED_S)
            assert story.condition("j", "PodsReady") == ("True", "Joined", "")

    play(told, Settings(defaults=PodDefaults(launcher_rbac=True)))
