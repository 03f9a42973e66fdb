"""Managed fields are cut out of what the API server writes, and nothing else is."""

import json
from typing import Any

import pytest

from polyreme_cluster.adapters.kubernetes.resources import without_managed_fields

FIELDS: dict[str, Any] = {
    "f:metadata": {"f:labels": {".": {}, "f:a": {}}},
    "f:spec": {"f:containers": {'k:{"name":"main"}': {}}},
}
MANAGED: list[dict[str, Any]] = [
    {"manager": 'a"]},"spec":{', "operation": "Update", "fieldsType": "FieldsV1", "fieldsV1": FIELDS},
    {"manager": "b", "operation": "Update", "subresource": "status", "fieldsV1": {"f:status": {'v:"]"': {}}}},
]


def pod(name: str, *, managed: bool = True, said: str = "") -> dict[str, Any]:
    metadata = {"name": name, "labels": {"a": "1"}, "annotations": {"said": said}}
    fields = {"managedFields": MANAGED} if managed else {}
    return {
        "metadata": {**metadata, **fields},
        "spec": {"containers": [{"name": "main", "env": [{"name": "A", "value": said}]}]},
        "status": {"phase": "Pending"},
    }


def job(name: str, *, managed: bool = True, said: str = "") -> dict[str, Any]:
    fields = {"managedFields": MANAGED} if managed else {}
    template = {"metadata": {"managedFields": MANAGED, "name": said}, "spec": {"containers": [{"name": said}]}}
    return {
        "apiVersion": "polyreme.dev/v1alpha1",
        "kind": "TrainingJob",
        "metadata": {"annotations": {"said": said}, "generation": 1, **fields, "name": name, "uid": "u"},
        "spec": {"workers": {"template": template}},
        "status": {"conditions": [{"message": said}]},
    }


def wire(value: Any) -> bytes:
    """Write as the API server does: without a space, in the order of the fields."""
    return json.dumps(value, separators=(",", ":")).encode()


@pytest.mark.parametrize("kind", ["Pod", "Node"])
def test_an_event_is_read_without_its_managed_fields(kind: str) -> None:
    line = wire({"type": "ADDED", "object": pod("one")}) + b"\n"
    assert json.loads(without_managed_fields(line, kind)) == {"type": "ADDED", "object": pod("one", managed=False)}


@pytest.mark.parametrize("said", ["", ',"managedFields":[', '],"name":"', '"spec":{', 'a"],"name":"b'])
def test_a_job_is_read_without_its_own_and_with_those_that_people_wrote(said: str) -> None:
    line = wire({"type": "ADDED", "object": job("one", said=said)}) + b"\n"
    found = json.loads(without_managed_fields(line, "TrainingJob"))
    assert found == {"type": "ADDED", "object": job("one", managed=False, said=said)}
    body = wire({"apiVersion": "polyreme.dev/v1alpha1", "items": [job("one", said=said), job("two")], "kind": "List"})
    found = json.loads(without_managed_fields(body, "TrainingJob"))
    assert found["items"] == [job("one", managed=False, said=said), job("two", managed=False)]


def test_every_item_of_a_list_is_read_without_them() -> None:
    items = [pod("one"), pod("two", managed=False), pod("three")]
    body = wire({"kind": "PodList", "metadata": {"resourceVersion": "7"}, "items": items})
    found = json.loads(without_managed_fields(body, "Pod"))
    assert found["items"] == [pod(name, managed=False) for name in ("one", "two", "three")]
    assert found["metadata"] == {"resourceVersion": "7"}


@pytest.mark.parametrize("said", [',"managedFields":[', ']},"spec":{', ',"managedFields":[]},"spec":{', '\\",\\"'])
@pytest.mark.parametrize("managed", [True, False])
def test_what_people_write_is_never_cut(said: str, managed: bool) -> None:
    kept = pod("one", managed=False, said=said)
    assert json.loads(without_managed_fields(wire(pod("one", managed=managed, said=said)), "Pod")) == kept


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        (json.dumps(pod("spaces")).encode(), "Pod"),
        (wire({"metadata": {"name": "x", "managedFields": MANAGED}}), "Pod"),
        (wire({"items": [{"metadata": {"labels": {}, "managedFields": MANAGED}}, pod("two")]}), "Pod"),
        (
            json.dumps(
                {
                    "metadata": {"labels": {}, "managedFields": MANAGED, "name": "x", "ownerReferences": [{}]},
                    "spec": {},
                },
                separators=(",", ":"),
            ).encode(),
            "Pod",
        ),
        (wire(pod("other")), "Service"),
        (wire(job("unmanaged", managed=False)), "TrainingJob"),
        (json.dumps(job("spaces")).encode(), "TrainingJob"),
    ],
    ids=[
        "written with spaces",
        "without a spec",
        "one without a spec, and another",
        "in another order",
        "another kind",
        "a job without them",
        "a job written with spaces",
    ],
)
def test_what_has_no_such_marks_is_left_whole(body: bytes, kind: str) -> None:
    assert without_managed_fields(body, kind) == body
