"""The object of the intents may be deleted or defaced by hand: admission continues, and nothing is given twice."""

import asyncio
import dataclasses

import pytest

from polyreme_api import labels
from polyreme_api.times import rfc3339
from polyreme_cluster.port import STATUS_SUBRESOURCE, ConflictError, Manifest, ObjectRef, PortError
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.scheduler import Batch, Limits, cluster_of, schedule
from polyreme_operator.snapshots import cluster_snapshot
from polyreme_operator.types.intents import INTENTS_KEY, Intents, IntentState, assume_all, intent_state, next_attempt
from polyreme_operator.types.views import JobView
from polyreme_operator.writer import status_patch
from tests.unit.operator.operator_scenes import NOW_S, admitted, answered, job, node
from tests.unit.operator.operator_stories import Story, play

SYSTEM = "polyreme-system"
INTENTS = ObjectRef(kind="ConfigMap", namespace=SYSTEM, name=labels.INTENTS_NAME)
PATIENCE_S = 5.0


def test_a_deleted_object_is_created_again_and_admission_goes_on() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        story.job("first")
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
            story.delete("ConfigMap", INTENTS.name, namespace=SYSTEM)
            await asyncio.sleep(PATIENCE_S)
            assert story.exists("ConfigMap", INTENTS.name, namespace=SYSTEM)
            story.job("second")
            await asyncio.sleep(PATIENCE_S)
            assert story.admitted("first")
            assert story.admitted("second")

    play(told)


def test_a_create_that_lands_late_brings_back_no_batch() -> None:
    """It may land after the object was deleted by hand: then all admissions are unknown."""

    async def told(story: Story) -> None:
        created: list[Manifest] = []
        create = story.store.create

        def noted(manifest: Manifest, *, dry_run: bool = False) -> Manifest:
            created.append(manifest)
            return create(manifest, dry_run=dry_run)

        story.store.create = noted  # type: ignore[method-assign]
        story.node()
        story.job("first")
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
            assert story.admitted("first")
        (late,) = [manifest for manifest in created if manifest["metadata"]["name"] == INTENTS.name]
        story.delete("ConfigMap", INTENTS.name, namespace=SYSTEM)
        model = ClusterCache()
        uid = story.job("second")
        for manifest in (story.store.get(story.ref("second")), create(late)):
            model.put(manifest, now_s=NOW_S)
        assert [entry.uid for entry in cluster_snapshot(model, now_s=NOW_S).intents.entries] == [uid]

    play(told)


@pytest.mark.parametrize("text", ["", "{", '{"a": 1}', "[1]", '[{"uid": "x"}]', None])
def test_an_object_that_cant_be_read_is_replaced_by_the_next_batch(text: str | None) -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        story.job("first")
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
            story.store.change(INTENTS, {"data": {INTENTS_KEY: text}})
            story.job("second")
            await asyncio.sleep(PATIENCE_S)
            assert story.admitted("second")

    play(told)


def test_an_admission_that_an_earlier_leader_still_writes_meets_another_version() -> None:
    """Its batch was written and deleted; the one node is given to another job before the write lands."""

    async def told(story: Story) -> None:
        story.node()
        story.job("early")
        model = ClusterCache()
        for kind in ("TrainingJob", "Node"):
            for manifest in story.objects(kind):
                model.put(manifest, now_s=story.clock.now_s())
        model.put({"kind": "ConfigMap", "metadata": _metadata("1"), "data": {INTENTS_KEY: "[]"}}, now_s=0.0)
        (late,) = schedule(cluster_snapshot(answered(model), now_s=story.clock.now_s()), story.clock.now_s()).writes
        patch, outcomes = {"status": status_patch(late.before, late.after)}, list[str]()

        def lands(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
            if ref == story.ref("other") and "attempt" in body["status"]:
                try:
                    story.store.patch(late.ref, patch, resource_version=late.resource_version, subresource="status")
                    outcomes.append("landed")
                except ConflictError:
                    outcomes.append("conflict")
            return None

        story.cluster.refuses = lands
        story.job("other", priority=10)
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
        assert story.admitted("other")
        assert outcomes == ["conflict"]

    play(told)


@pytest.mark.parametrize("kind", ["Succeeded", "Failed"])
def test_an_admission_never_lands_on_a_job_that_has_ended(kind: str) -> None:
    """Decided before the end, it names an older version; a job that has ended is not admitted, so none is decided."""

    async def told(story: Story) -> None:
        story.node()
        story.job("early")

        def decided() -> Batch:
            model = ClusterCache()
            for manifest in (*story.objects("TrainingJob"), *story.objects("Node")):
                model.put(manifest, now_s=story.clock.now_s())
            model.put({"kind": "ConfigMap", "metadata": _metadata("1"), "data": {INTENTS_KEY: "[]"}}, now_s=0.0)
            return schedule(cluster_snapshot(answered(model), now_s=story.clock.now_s()), story.clock.now_s())

        (late,) = decided().writes
        now = rfc3339(story.clock.now_s())
        end = {"type": kind, "status": "True", "reason": "Completed", "lastTransitionTime": now}
        story.store.change(late.ref, {"status": {"conditions": [end]}}, subresource=STATUS_SUBRESOURCE)
        patch = {"status": status_patch(late.before, late.after)}
        with pytest.raises(ConflictError):
            story.store.patch(late.ref, patch, resource_version=late.resource_version, subresource=STATUS_SUBRESOURCE)
        assert decided().writes == ()

    play(told)


def test_jobs_are_cancelled_a_bounded_number_at_a_time() -> None:
    owners = tuple(job(f"j{at}") for at in range(5))
    unknown = assume_all(Intents(known=False), owners)
    batch = schedule(cluster_of(jobs=owners, nodes=(node(),), intents=unknown), NOW_S, limits=Limits(admissions_max=2))
    assert [write.after.cancelled_admissions for write in batch.writes] == [1, 1]
    assert batch.again
    assert batch.intents is None


@pytest.mark.parametrize(
    ("attempt", "cancelled", "state"),
    [
        (2, 3, IntentState.OPEN),
        (3, 3, IntentState.CONFIRMED),
        (4, 3, IntentState.CONFIRMED),
        (2, 4, IntentState.CANCELLED),
        (3, 4, IntentState.CONFIRMED),
        (None, 3, IntentState.VOID),
    ],
    ids=["not yet", "landed", "and the next attempt begun", "cancelled", "landed, the next cancelled", "job deleted"],
)
def test_an_intent_is_settled_once_its_attempt_or_a_cancellation_is_recorded(
    attempt: int | None, cancelled: int, state: IntentState
) -> None:
    def at(number: int, cancelled: int) -> JobView:
        owner = admitted(job())
        assert owner.attempt is not None
        changed = {
            "attempt": owner.attempt.model_copy(update={"number": number}),
            "cancelled_admissions": cancelled,
        }
        return dataclasses.replace(owner, status=owner.status.model_copy(update=changed))

    before = at(2, 3)
    jobs = {} if attempt is None else {before.uid: at(attempt, cancelled)}
    assert intent_state(next_attempt(before), jobs) is state


def test_another_objects_deletion_changes_nothing() -> None:
    model = ClusterCache()
    model.put({"kind": "ConfigMap", "metadata": _metadata("7"), "data": {INTENTS_KEY: "[]"}}, now_s=0.0)
    other = ObjectRef(kind="ConfigMap", namespace=SYSTEM, name="kube-root-ca.crt")
    assert not model.remove(other, version=8).asks
    assert cluster_snapshot(model, now_s=0.0).intents == Intents(resource_version="7")


def _metadata(version: str) -> dict[str, str]:
    return {"name": INTENTS.name, "namespace": SYSTEM, "resourceVersion": version}
