"""What a job owns comes back when it is deleted by hand, while the job is active."""

import asyncio

import pytest

from polyreme_api import labels
from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef, PortError
from polyreme_operator.cache.children import CONFIRMED_S
from tests.unit.operator.operator_stories import NAMESPACE, Story, play

CHILDREN = ("Service", "Secret", "ServiceAccount", "Role", "RoleBinding", "Lease")
PULLS = "imagePullSecrets"


def child(story: Story, kind: str) -> ObjectRef:
    """The job's object of a kind; the installation's own Secret is in another namespace."""
    (found,) = (each for each in story.objects(kind) if each["metadata"]["namespace"] == NAMESPACE)
    return ObjectRef.of(found)


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
        async with story.operator():
            await train(story, uid, 10.0)
            ref = child(story, kind)
            before = story.store.get(ref)
            story.delete(kind, ref.name)
            await train(story, uid, CONFIRMED_S + 10.0)
            after = story.store.get(ref)
            assert after["metadata"]["uid"] != before["metadata"]["uid"]
            assert after.get("data") == before.get("data"), "pods that have read the old Secret know the new one"
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


@pytest.mark.parametrize("kind", ["Service", "Secret", "ServiceAccount"])
def test_an_attempt_that_starts_a_pod_has_what_its_pods_need(kind: str) -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        uid = story.job("j", replicas=2)
        async with story.operator():
            await train(story, uid, 10.0)
            first = {pod["metadata"]["uid"] for pod in story.objects("Pod")}
            ref = child(story, kind)
            story.delete(kind, ref.name)
            story.store.delete(_pod(story, 1), uid=None, grace_period_s=0)
            await train(story, uid, 20.0)
            assert story.exists(kind, ref.name)
            kept = first & {pod["metadata"]["uid"] for pod in story.objects("Pod")}
            assert (len(story.objects("Pod")), len(kept)) == (2, 1)
            assert story.condition("j", "Running")[1] == "Training"

    play(told)


def test_an_account_pulls_images_with_the_secrets_of_the_namespaces_own_account() -> None:
    async def told(story: Story) -> None:
        story.node()
        pulls = [{"name": "registry"}]
        metadata = {"name": "default", "namespace": NAMESPACE}
        story.store.create({"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata} | {PULLS: pulls})
        uid = story.job("j")
        async with story.operator():
            await train(story, uid, 10.0)
        own = {each["metadata"]["name"]: each[PULLS] for each in story.objects("ServiceAccount")}
        assert own[labels.job_object_name("j", uid)] == pulls

    play(told)


def test_a_quota_that_is_full_of_what_the_job_has_ends_nothing() -> None:
    """Quota is looked at before anybody looks whether the object is there."""

    async def told(story: Story) -> None:
        story.node()
        uid = story.job("j")

        def full(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
            taken = verb == "create" and ref.kind in CHILDREN[:3] and story.exists(ref.kind, ref.name)
            return InvalidObjectError(f"create of {ref} refused: 403 Forbidden, exceeded quota") if taken else None

        story.cluster.refuses = full
        async with story.operator():
            await train(story, uid, 3 * CONFIRMED_S)
            assert story.status("j")["attempt"]["number"] == 1
            assert story.condition("j", "Running")[1] == "Training"
            assert story.cluster.count("create", "Service") < 10

    play(told)


def _pod(story: Story, index: int) -> ObjectRef:
    pods = {pod["metadata"]["labels"][labels.LABEL_INDEX]: pod for pod in story.objects("Pod")}
    return ObjectRef.of(pods[str(index)])
