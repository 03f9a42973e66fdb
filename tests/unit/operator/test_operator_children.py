"""What a job owns and somebody deletes by hand comes back while the job is active."""

import asyncio
import base64

import pytest

from polyreme_api import labels
from polyreme_operator.cache.children import CONFIRMED_S
from polyreme_operator.port import InvalidObjectError, Manifest, ObjectRef, PortError
from tests.unit.operator.operator_stories import NAMESPACE, Story, play

CHILDREN = ("Service", "Secret", "Role", "RoleBinding", "Lease")
PATIENCE_S = 5.0


async def train(story: Story, uid: str, seconds: float) -> None:
    """Let a job's launcher report for a while."""
    until_s = story.clock.now_s() + seconds
    while story.clock.now_s() < until_s:
        story.runs()
        if story.status("j").get("attempt") and story.exists("Lease", labels.job_object_name("j", uid)):
            story.reports("j", uid, step=int(story.clock.now_s()) % 1_000_000)
        await asyncio.sleep(2.0)


@pytest.mark.parametrize("kind", CHILDREN)
def test_an_object_that_is_deleted_while_its_job_trains_is_created_again(kind: str) -> None:
    async def told(story: Story) -> None:
        story.node()
        uid = story.job("j")
        name = labels.job_object_name("j", uid)
        async with story.operator():
            await train(story, uid, 10.0)
            before = story.store.get(ObjectRef(kind=kind, namespace=NAMESPACE, name=name))["metadata"]["uid"]
            story.delete(kind, name)
            await train(story, uid, CONFIRMED_S + 10.0)
            after = story.store.get(ObjectRef(kind=kind, namespace=NAMESPACE, name=name))["metadata"]["uid"]
            assert after != before
            assert story.status("j")["attempt"]["number"] == 1

    play(told)


def test_what_exists_is_asked_for_seldom() -> None:
    async def told(story: Story) -> None:
        story.node()
        uid = story.job("j")
        async with story.operator():
            await train(story, uid, 10 * CONFIRMED_S)
            assert 10 <= story.cluster.count("create", "Service") <= 21

    play(told)


@pytest.mark.parametrize("kind", ["Service", "Secret"])
def test_an_attempt_that_starts_a_pod_has_what_its_pods_need(kind: str) -> None:
    """Of a Secret that is made again the bytes are others: then the pods that have read the old one go, too."""

    async def told(story: Story) -> None:
        story.node(devices=2)
        uid = story.job("j", replicas=2)
        name = labels.job_object_name("j", uid)
        async with story.operator():
            await train(story, uid, 10.0)
            first = {pod["metadata"]["uid"] for pod in story.objects("Pod")}
            story.delete(kind, name)
            story.store.delete(_pod(story, 1), uid=None, grace_period_s=0)
            await train(story, uid, 20.0)
            assert story.exists(kind, name)
            kept = first & {pod["metadata"]["uid"] for pod in story.objects("Pod")}
            assert len(story.objects("Pod")) == 2
            assert len(kept) == (0 if kind == "Secret" else 1)
            assert story.condition("j", "Running")[1] == "Training"

    play(told)


def test_a_quota_that_is_full_of_what_the_job_has_ends_nothing() -> None:
    """Quota is looked at before anybody looks whether the object is there."""

    async def told(story: Story) -> None:
        story.node()
        uid = story.job("j")

        def full(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
            taken = verb == "create" and ref.kind in {"Service", "Secret"} and story.exists(ref.kind, ref.name)
            return InvalidObjectError(f"create of {ref} refused: 403 Forbidden, exceeded quota") if taken else None

        story.cluster.refuses = full
        async with story.operator():
            await train(story, uid, 3 * CONFIRMED_S)
            assert story.status("j")["attempt"]["number"] == 1
            assert story.condition("j", "Running")[1] == "Training"
            assert story.cluster.count("create", "Service") < 10

    play(told)


def test_a_secret_has_fresh_bytes_each_time() -> None:
    async def told(story: Story) -> None:
        story.node()
        uid = story.job("j")
        ref = ObjectRef(kind="Secret", namespace=NAMESPACE, name=labels.job_object_name("j", uid))
        async with story.operator():
            await train(story, uid, 10.0)
            first = story.store.get(ref)["data"][labels.SECRET_KEY]
            story.delete("Secret", ref.name)
            await train(story, uid, CONFIRMED_S + 10.0)
            assert base64.b64decode(story.store.get(ref)["data"][labels.SECRET_KEY]) != base64.b64decode(first)

    play(told)


def _pod(story: Story, index: int) -> ObjectRef:
    pods = {pod["metadata"]["labels"][labels.LABEL_INDEX]: pod for pod in story.objects("Pod")}
    return ObjectRef.of(pods[str(index)])
