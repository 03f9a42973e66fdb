"""A job whose status the API server refuses is left as it is: its intent is settled, and everyone else continues."""

import asyncio
from typing import Any

import pytest

from polyreme_api import labels
from polyreme_cluster.port import InvalidObjectError, Manifest, ObjectRef, PortError
from polyreme_operator.cluster_cache import ClusterCache
from polyreme_operator.quarantine import IN_FLIGHT_S
from polyreme_operator.types.intents import INTENTS_KEY, Intent, render_intents
from tests.unit.operator.operator_stories import NAMESPACE, Refusal, Story, play

SYSTEM = "polyreme-system"
PATIENCE_S = 5.0
SENTENCE = 'trainingjobs.polyreme.dev "refused" is forbidden: ValidatingAdmissionPolicy'


def refuse_status(*fields: str, name: str = "refused") -> Refusal:
    """Refuse writes of a job's status that bear one of these fields; none: all writes of it."""

    def review(verb: str, ref: ObjectRef, body: Manifest) -> PortError | None:
        if verb != "patch" or ref.kind != labels.KIND_JOB or ref.name != name:
            return None
        touched = not fields or any(field in body["status"] for field in fields)
        return InvalidObjectError(f"patch of {ref} refused: 422 Invalid, {SENTENCE}") if touched else None

    return review


@pytest.mark.parametrize("fields", [(), ("attempt",)], ids=["everything", "the admission"])
def test_others_are_admitted_at_once_beside_a_job_whose_status_is_refused(fields: tuple[str, ...]) -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        story.cluster.refuses = refuse_status(*fields)
        async with story.operator():
            await asyncio.sleep(1.0)
            story.job("refused", priority=10)
            await asyncio.sleep(PATIENCE_S)
            story.job("other")
            await asyncio.sleep(1.0)
            assert story.admitted("other")
            assert not story.admitted("refused")

    play(told)


def test_the_refusal_is_an_event_and_a_metric_and_a_condition_where_that_may_be_written() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        story.cluster.refuses = refuse_status("attempt")
        story.job("refused")
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
            events = [event for event in story.objects("Event") if event["reason"] == "StatusRefused"]
            assert SENTENCE in events[0]["message"]
            held, reason, message = story.condition("refused", "Degraded")
            assert (held, reason) == ("True", "StatusRefused")
            assert SENTENCE in message
            assert story.metrics.registry.get_sample_value("polyreme_quarantined_jobs") == 1.0

    play(told)


def test_it_is_retried_seldom_and_admitted_once_nothing_is_refused() -> None:
    async def told(story: Story) -> None:
        story.node(devices=2)
        story.cluster.refuses = refuse_status("attempt")
        story.job("refused")
        async with story.operator():
            await asyncio.sleep(100.0)
            tried = story.cluster.count("patch", "ConfigMap") + story.cluster.count("create", "ConfigMap")
            assert 5 <= tried <= 12
            story.cluster.refuses = lambda verb, ref, body: None
            await asyncio.sleep(130.0)
            assert story.admitted("refused")
            assert story.condition("refused", "Degraded")[0] == ""

    play(told)


def test_a_refused_informational_write_delays_no_other_status() -> None:
    async def told(story: Story) -> None:
        story.cluster.refuses = refuse_status()
        names = [f"j{at}" for at in range(20)]
        async with story.operator():
            await asyncio.sleep(1.0)
            for name in ("refused", *names):
                story.job(name)
            await asyncio.sleep(PATIENCE_S)
            assert all(story.condition(name, "Queued")[0] == "True" for name in names)

    play(told)


def test_a_victim_that_cant_be_asked_is_not_waited_for() -> None:
    async def told(story: Story) -> None:
        story.node("n0", devices=1)
        story.node("n1", devices=1)
        queue = {"apiVersion": labels.API_VERSION, "kind": labels.KIND_QUEUE, "metadata": {"name": "default"}}
        story.store.create({**queue, "spec": {"quotas": [], "preemption": {"cooldownSeconds": 0}}})
        story.job("refused")
        story.job("other")
        async with story.operator():
            await asyncio.sleep(PATIENCE_S)
            story.cluster.refuses = refuse_status("preemption")
            story.job("urgent", priority=100)
            await asyncio.sleep(PATIENCE_S)
            assert story.condition("other", "Preempted")[0] == "True"

    play(told)


def test_what_an_earlier_leader_may_have_sent_is_waited_for_as_long_as_a_request_lasts() -> None:
    """Its intent can't be cancelled; nothing is given to others until nothing of it can land."""

    async def told(story: Story) -> None:
        story.node()
        uid = story.job("refused")
        entry = Intent(namespace=NAMESPACE, name="refused", uid=uid, attempt=1, cancelled_admissions=0)
        story.store.create(
            {
                "apiVersion": "v1",
                "kind": "ConfigMap",
                "metadata": {"name": labels.INTENTS_NAME, "namespace": SYSTEM},
                "data": {INTENTS_KEY: render_intents((entry,))},
            }
        )
        story.cluster.refuses = refuse_status()
        story.job("other")
        async with story.operator():
            await asyncio.sleep(IN_FLIGHT_S - 5.0)
            assert not story.admitted("other")
            await asyncio.sleep(40.0)
            assert story.admitted("other")

    play(told)


def test_an_entry_is_settled_until_the_next_batch() -> None:
    model, entry = ClusterCache(), Intent(namespace="", name="j", uid="u", attempt=1, cancelled_admissions=0)
    metadata: dict[str, Any] = {"name": labels.INTENTS_NAME, "namespace": SYSTEM}
    for version in ("1", "2"):
        data = {INTENTS_KEY: render_intents((entry,))}
        model.put({"kind": "ConfigMap", "metadata": {**metadata, "resourceVersion": version}, "data": data}, now_s=0.0)
        assert model.intents.is_intended("u")
        model.intents.settle("u")
        assert not model.intents.is_intended("u")
