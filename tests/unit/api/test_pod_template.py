"""A pod template is held to Kubernetes' own types, in YAML, in the CRD and where the operator reads it."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from polyreme_api.crd.definitions import JOB, crd
from polyreme_api.crd.pod_template import KEEPS_UNKNOWN, pod_template_schema
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from polyreme_api.pod_template import unknown_fields
from tests.unit.api.jobs import job_with

APPLIED_BYTES_MAX = 262_144
"""Annotations of one object: plain ``kubectl apply`` keeps the whole definition in one."""
REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"spec": {"affinity": "spread"}}, 'spec.affinity: must be an object, got the string "spread"'),
    ({"spec": {"tolerations": {"key": "a"}}}, "spec.tolerations: must be a list, got an object"),
    ({"spec": {"tolerations": ["a"]}}, 'spec.tolerations.0: must be an object, got the string "a"'),
    ({"spec": {"tolerations": [None]}}, "spec.tolerations.0: must be an object, got nothing"),
    ({"spec": {"hostNetwork": "yes"}}, 'spec.hostNetwork: must be true or false, got the string "yes"'),
    ({"spec": {"priority": 1 << 31}}, "spec.priority: must be an integer of 32 bits, got the number 2147483648"),
    ({"spec": {"priority": True}}, "spec.priority: must be an integer of 32 bits, got true"),
    ({"spec": {"priority": 1 << 4000}}, "spec.priority: must be an integer of 32 bits, got the number of 4001 bits"),
    (
        {"spec": {"overhead": {"cpu": "1e999999"}}},
        'spec.overhead.cpu: must be a quantity such as 2, "500m" or "8Gi", got the string "1e999999"',
    ),
    (
        {"spec": {"containers": [{"livenessProbe": {"httpGet": {"port": 1.5}}}]}},
        "spec.containers.0.livenessProbe.httpGet.port: must be an integer or a string, got the number 1.5",
    ),
    (
        {"metadata": {"labels": {"a": 1}}, "spec": {"nodeSelector": []}},
        "metadata.labels.a: must be a string, got the number 1 (and 1 more)",
    ),
]


def read(template: object) -> None:
    parse_job(job_with({"spec.workers": {"template": template}}))


@pytest.mark.parametrize(("template", "words"), REFUSED, ids=[words[:50] for _, words in REFUSED])
def test_a_refusal_names_the_field_the_value_and_the_rule(template: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidConfigError) as refused:
        read(template)
    assert refused.value.message == f"spec.workers.template.{words}"
    assert refused.value.field == f"spec.workers.template.{words.split(':', maxsplit=1)[0]}"


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"spec": {"tolerations": None, "containers": [{"env": None}]}},
        {"spec": {"fieldOfNextYear": ["anything"], "containers": [{"alsoNew": 1.5}]}},
        {"spec": {"containers": [{"resources": {"requests": {"cpu": 2, "memory": "1.5Gi", "a/b": "1e3"}}}]}},
        {"spec": {"containers": [{"ports": [{"containerPort": 80}], "env": [{"name": "A", "value": "1"}]}]}},
        {"metadata": {"labels": {"team": "vision"}}, "spec": {"nodeSelector": {"a": "b"}, "hostIPC": True}},
    ],
    ids=str,
)
def test_what_kubernetes_takes_is_taken(template: dict[str, Any]) -> None:
    read(template)


def test_the_number_of_errors_of_one_template_is_bounded() -> None:
    with pytest.raises(InvalidConfigError, match="and 9 more"):
        read({"spec": {"tolerations": ["x"] * 1_000}})


def objects(schema: dict[str, Any]) -> Iterator[dict[str, Any]]:
    if "properties" in schema:
        yield schema
    for inner in schema.get("properties", {}).values():
        yield from objects(inner)
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from objects(schema[key])


def test_the_definition_keeps_unknown_fields_at_every_level_and_takes_null_for_absent() -> None:
    found = list(objects(pod_template_schema()))
    assert len(found) > 100
    for each in found:
        assert each[KEEPS_UNKNOWN] is True
        assert all(inner["nullable"] is True for inner in each["properties"].values())


def test_the_definition_is_small_enough_for_plain_kubectl_apply() -> None:
    assert len(json.dumps(crd(JOB), separators=(",", ":"))) < 0.8 * APPLIED_BYTES_MAX


@pytest.mark.parametrize(
    ("template", "words"),
    [
        (
            {"spec": {"nodeSelectors": {"a": "b"}}},
            "spec.nodeSelectors is no field of a pod's spec; did you mean nodeSelector?",
        ),
        (
            {"spec": {"containers": [{"name": "c"}, {"resource": {"limits": {}}}]}},
            "spec.containers.1.resource is no field of a container; did you mean resources?",
        ),
        (
            {"spec": {"containers": [{"resources": {"request": {"cpu": 1}}}]}},
            "spec.containers.0.resources.request is no field of a container's resources; did you mean requests?",
        ),
        (
            {"metadata": {"label": {"a": "b"}}},
            "metadata.label is no field of an object's metadata; did you mean labels?",
        ),
        ({"specs": {}}, "specs is no field of a pod template; did you mean spec?"),
        ({"spec": {"zzz": [1]}}, "spec.zzz is no field of a pod's spec"),
        (
            {"spec": {"volumes": [{"name": "v", "emptyDir": {"sizeLimits": "1Gi"}}]}},
            "spec.volumes.0.emptyDir.sizeLimits is no field of EmptyDirVolumeSource; did you mean sizeLimit?",
        ),
    ],
)
def test_a_field_that_kubernetes_does_not_know_is_named_with_the_nearest_one(
    template: dict[str, Any], words: str
) -> None:
    read(template)
    said = unknown_fields(template)
    assert said.startswith(f"spec.workers.template.{words}. An API server drops fields that it doesn't know")


@pytest.mark.parametrize(
    "template",
    [
        {},
        {"spec": {"nodeSelectors": None}},
        {"metadata": {"labels": {"anything": "goes"}, "annotations": {"a": "b"}}},
        {"spec": {"nodeSelector": {"any": "label"}, "overhead": {"any/resource": "1"}}},
        {
            "spec": {
                "containers": [{"resources": {"limits": {"any/resource": 1}}}],
                "resources": {"requests": {"cpu": 1}},
            }
        },
    ],
    ids=str,
)
def test_what_kubernetes_knows_is_not_named(template: dict[str, Any]) -> None:
    assert unknown_fields(template) == ""


def test_unknown_fields_are_named_up_to_a_bound_and_counted_beyond() -> None:
    said = unknown_fields({"spec": {f"new{at}": 1 for at in range(9)}})
    assert said.count("is no field of a pod's spec") == 5
    assert " (and 4 more). " in said
    assert len(unknown_fields({"spec": {"x" * 10_000: 1}})) < 300
