"""A gang whose pods are refused says so at once, gives back what it holds, is tried again, and fails by policy."""

import asyncio
import dataclasses
import itertools

import pytest

from polyreme_api import labels
from polyreme_api.job.status import RestartRecord
from polyreme_api.times import rfc3339
from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef, PortError
from polyreme_operator.reconcile.failure_policy import REFUSALS_MAX, GiveUp, Restart, judge
from polyreme_operator.reconcile.observe import REFUSED_S
from polyreme_operator.scheduler.elastic import REFUSED_GROWTH_S, sizes, was_refused_lately
from polyreme_operator.types.snapshot import JobSnapshot, Refusal
from polyreme_operator.types.timestamps import parse_time_or
from tests.unit.operator.operator_scenes import NOW_S, admitted, job, pod, snapshot
from tests.unit.operator.operator_stories import Story, play

PATIENCE_S = 6.5
"""Longer than a refusal of three seconds, and the longest wait for the retry after it."""
QUOTA = 'pods "x" is forbidden: exceeded quota: team, requested: pods=1, used: pods=4, limited: pods=4'


def refuse(kind: str, sentence: str, *, after: int = 0) -> object:
    """Refuse objects of a kind, after the first few."""
    seen: list[ObjectRef] = []

    def review(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
        if (verb, ref.kind) != ("create", kind):
            return None
        if body["metadata"]["labels"][labels.LABEL_JOB] != "refused":
            return None
        seen.append(ref)
        return InvalidObjectError(f"create of {ref} refused: {sentence}") if len(seen) > after else None

    return review


@pytest.mark.parametrize("kind", ["Pod", "Lease"])
@pytest.mark.parametrize(
    "sentence", [f"403 Forbidden, {QUOTA}", "422 Invalid, spec.containers[0].name: Required value"]
)
def test_a_refusal_is_reported_at_once_and_frees_nodes_and_quota(kind: str, sentence: str) -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        story.cluster.refuses = refuse(kind, sentence)  # type: ignore[assignment]
        story.job("refused", replicas=4)
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
            held, reason, message = story.condition("refused", "Queued")
            assert (held, reason) == ("True", "CreateRefused")
            assert sentence in message
            assert story.status("refused")["reason"] == "CreateRefused"
            assert not story.admitted("refused")
            story.job("other", replicas=4)
            await asyncio.sleep(1.0)
            assert story.admitted("other")

    play(told)


def test_a_gang_of_which_some_pods_were_created_gives_them_back() -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        story.cluster.refuses = refuse("Pod", QUOTA, after=2)  # type: ignore[assignment]
        story.job("refused", replicas=4)
        async with story.operator():
            await asyncio.sleep(1.0)
            story.runs()
            await asyncio.sleep(PATIENCE_S - 1.5)
            story.runs()
            await asyncio.sleep(0.5)
            assert story.objects("Pod") == []
            assert story.condition("refused", "Queued")[1] == "CreateRefused"

    play(told)


def test_it_is_tried_again_later_each_time_and_starts_once_nothing_is_refused() -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        story.cluster.refuses = refuse("Pod", QUOTA, after=0)  # type: ignore[assignment]
        story.job("refused", failurePolicy={"backoff": {"initialSeconds": 10, "maxSeconds": 100}})
        async with story.operator():
            await asyncio.sleep(90.0)
            records = story.status("refused")["restartRecords"]
            assert [record["cause"] for record in records] == ["CreateRefused"] * 4
            times = [parse_time_or(record["at"], 0.0) for record in records]
            assert [round(later - at) for at, later in itertools.pairwise(times)] == [
                10 + REFUSED_S,
                20 + REFUSED_S,
                40 + REFUSED_S,
            ]
            story.cluster.refuses = lambda verb, ref, body: None
            await asyncio.sleep(80.0)
            assert story.admitted("refused")
            assert len(story.objects("Pod")) == 1

    play(told)


@pytest.mark.parametrize(("allowed", "tries"), [(0, 1), (2, 3)])
def test_it_fails_when_max_restarts_is_used_up(allowed: int, tries: int) -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)
        story.cluster.refuses = refuse("Pod", QUOTA)  # type: ignore[assignment]
        story.job("refused", failurePolicy={"maxRestarts": allowed})
        async with story.operator():
            await asyncio.sleep(60.0)
            failed, reason, message = story.condition("refused", "Failed")
            assert (failed, reason) == ("True", "CreateRefused")
            assert f"refused {tries} times in a row" in message
            assert QUOTA in message
            assert story.status("refused")["attempt"]["number"] == tries

    play(told)


def test_a_quota_that_lags_behind_pods_that_have_gone_costs_one_pod_and_no_gang() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        uid = story.job("refused", replicas=2)
        async with story.operator():
            for _ in range(3):
                await asyncio.sleep(1.0)
                story.runs()
            story.reports("refused", uid, step=1)
            first, second = story.objects("Pod")
            story.cluster.refuses = refuse("Pod", QUOTA)  # type: ignore[assignment]
            story.store.delete(ObjectRef.of(second), uid=None, grace_period_s=0)
            await asyncio.sleep(REFUSED_S - 1.0)
            story.cluster.refuses = lambda verb, ref, body: None
            await asyncio.sleep(PATIENCE_S)
            assert first["metadata"]["uid"] in {pod["metadata"]["uid"] for pod in story.objects("Pod")}
            assert [record["cause"] for record in story.status("refused")["restartRecords"]] == ["PodLost"]
            assert len(story.objects("Pod")) == 2

    play(told)


def test_an_elastic_job_takes_as_many_workers_as_are_not_refused() -> None:
    async def told(story: Story) -> None:
        story.node(devices=4)

        def full(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
            if (verb, ref.kind) != ("create", "Pod") or len(story.objects("Pod")) < 2:
                return None
            return InvalidObjectError(f"create of {ref} refused: {QUOTA}")

        story.cluster.refuses = full
        story.job("refused", replicas=4, elastic=(1, 4))
        async with story.operator():
            for _ in range(60):
                await asyncio.sleep(1.0)
                story.runs()
            assert story.admitted("refused")
            assert story.status("refused")["attempt"]["replicas"] == 2
            assert len(story.objects("Pod")) == 2

    play(told)


def test_a_job_whose_pods_were_refused_is_not_grown_for_an_hour() -> None:
    owner = admitted(job(workers={"replicas": 2, "minReplicas": 1, "devices": 1}))
    record = RestartRecord(attempt=1, at=rfc3339(NOW_S), cause="CreateRefused", scope="RestartProcess")
    refused = dataclasses.replace(owner, status=owner.status.model_copy(update={"restart_records": [record]}))
    assert was_refused_lately(refused, NOW_S + REFUSED_GROWTH_S - 1)
    assert not was_refused_lately(refused, NOW_S + REFUSED_GROWTH_S)
    assert list(sizes(owner)) == [2, 1]
    assert list(sizes(refused)) == [1]


def test_no_policy_retries_for_ever_and_an_earlier_failure_does_not_count() -> None:
    def seen(refusals: int) -> JobSnapshot:
        owner = admitted(job(failurePolicy={"maxRestarts": 1000}), replicas=0)
        causes = ["PodLost", *["CreateRefused"] * refusals]
        records = [
            RestartRecord(attempt=number, at=rfc3339(NOW_S), cause=cause, scope="RestartPod", counts=False)
            for number, cause in enumerate(causes, start=1)
        ]
        status = owner.status.model_copy(update={"restart_records": records})
        refusal = Refusal(kind="Pod", attempt=1, message="no", since_s=NOW_S - REFUSED_S)
        return snapshot(dataclasses.replace(owner, status=status), pods=(pod(owner, 0),), refusals=(refusal,))

    for refusals, verdict in ((REFUSALS_MAX - 1, Restart), (REFUSALS_MAX, GiveUp)):
        given = seen(refusals)
        assert given.job.spec is not None
        assert isinstance(judge(given, given.job.spec, NOW_S), verdict)
