"""Fields of a pod template that the API server would drop are named by the job's condition and by an event."""

import asyncio

import pytest

from tests.unit.operator.operator_stories import Story, play

MISSPELT = {"spec": {"nodeSelectors": {"disk": "ssd"}, "containers": [{"name": "c", "resource": {}}]}}


@pytest.mark.parametrize("devices", [0, 1], ids=["waits", "runs"])
def test_unknown_fields_are_named_by_a_condition_and_an_event(devices: int) -> None:
    async def told(story: Story) -> None:
        if devices:
            story.node(devices=devices)
        story.job("j", workers={"replicas": 1, "template": MISSPELT})
        async with story.operator():
            await asyncio.sleep(5.0)
            assert story.admitted("j") == bool(devices)
            held, reason, message = story.condition("j", "TemplateFieldsUnknown")
            assert (held, reason) == ("True", "UnknownFields")
            assert (
                "spec.workers.template.spec.nodeSelectors is no field of a pod's spec; did you mean nodeSelector?"
                in message
            )
            assert "spec.workers.template.spec.containers.0.resource is no field of a container" in message
            (event,) = [event for event in story.objects("Event") if event["reason"] == "UnknownFields"]
            assert event["type"] == "Warning"
            assert "did you mean nodeSelector?" in event["message"]
            if devices:
                (pod,) = story.objects("Pod")
                assert pod["spec"]["nodeSelectors"] == {"disk": "ssd"}, "a newer API server may know it"

    play(told)


def test_a_template_of_known_fields_has_no_such_condition() -> None:
    async def told(story: Story) -> None:
        story.node()
        story.job("j", workers={"replicas": 1, "template": {"spec": {"nodeSelector": {}}}})
        async with story.operator():
            await asyncio.sleep(5.0)
            assert story.condition("j", "TemplateFieldsUnknown") == ("", "", "")

    play(told)
