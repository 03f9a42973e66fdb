"""The CRD: structural, bounded, with the rules of the types, and nothing that may change by mistake."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from polyreme_api.job import TrainingJobSpec, TrainingJobStatus, parse_job
from polyreme_api.job import data as data_types
from polyreme_api.job import model as model_types
from polyreme_api.job import policy as policy_types
from polyreme_api.job import status as status_types
from polyreme_api.job import workers as workers_types
from polyreme_api.job.crd import LIST_KEYS, MUTABLE, RULES, training_job_crd, training_job_schema
from polyreme_operator.core.reasons import ConditionType
from tests.unit.api.jobs import job_with

Schema = dict[str, Any]
ALLOWED = {
    "type", "description", "default", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties", "required", "properties", "items", "additionalProperties",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields",
}  # fmt: skip
SCHEMA = training_job_schema()


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}".removeprefix("."))
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


NODES = dict(nodes(SCHEMA))


def test_every_node_is_structural() -> None:
    for path, node in NODES.items():
        assert node["type"] in {"object", "array", "string", "integer", "boolean"}, path
        assert set(node) <= ALLOWED, path
        assert not {"properties", "additionalProperties"} <= set(node), path
        assert ("items" in node) == (node["type"] == "array"), path
        assert set(node.get("required", ())) <= set(node.get("properties", ())), path


def test_every_string_list_and_map_is_bounded() -> None:
    for path, node in NODES.items():
        if path in {"apiVersion", "kind", "metadata"}:
            continue
        match node:
            case {"type": "string"}:
                assert "maxLength" in node or "enum" in node, path
            case {"type": "array"}:
                assert "maxItems" in node, path
            case {"additionalProperties": _}:
                assert "maxProperties" in node, path


def test_only_the_pod_template_is_free_form() -> None:
    free = [path for path, node in NODES.items() if "x-kubernetes-preserve-unknown-fields" in node]
    assert free == ["spec.workers.template"]


def test_no_field_is_a_float() -> None:
    assert not [path for path, node in NODES.items() if node["type"] == "number"]


def test_every_field_is_described_in_plain_words() -> None:
    for path, node in NODES.items():
        if path == "" or path.endswith(("[]", "{}")) or path == "metadata":
            continue
        assert node.get("description"), path
        assert "``" not in node["description"], path


def test_names_are_camel_case() -> None:
    for node in NODES.values():
        assert all(name.isalnum() and name[0].islower() for name in node.get("properties", ()))


def apply_defaults(schema: Schema, value: Any) -> Any:
    """Fill defaults as the API server does: top down, nested ones into empty objects."""
    if schema["type"] == "array" and value is not None:
        return [apply_defaults(schema["items"], inner) for inner in value]
    if schema["type"] != "object" or "properties" not in schema:
        return value
    filled = {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner}
    filled |= value
    return {name: apply_defaults(schema["properties"][name], inner) for name, inner in filled.items()}


def without_empty(value: Any) -> Any:
    match value:
        case dict():
            return {name: without_empty(inner) for name, inner in value.items() if inner not in ({}, [])}
        case list():
            return [without_empty(inner) for inner in value]
        case _:
            return value


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"spec.evaluation": {"sets": [{"name": "a", "dataset": "held/a"}]}, "spec.export": {}},
        {"spec.failurePolicy": {"rules": [{"action": "Fail", "onPodConditions": [{"type": "DisruptionTarget"}]}]}},
        {"spec.parallelism": {"mode": "Explicit", "dp": 1}, "spec.health": {"hang": {"action": "Restart"}}},
    ],
)
def test_the_api_server_fills_the_same_defaults_as_we_do(changes: dict[str, Any]) -> None:
    document = job_with(changes)
    ours = parse_job(document).to_object()["spec"]
    assert without_empty(apply_defaults(NODES["spec"], document["spec"])) == without_empty(ours)


def test_the_status_has_no_defaults() -> None:
    assert not [path for path, node in nodes(NODES["status"]) if "default" in node]


def rules_at(path: str) -> list[str]:
    return [rule["rule"] for rule in NODES[path].get("x-kubernetes-validations", ())]


def frozen(path: str) -> bool:
    parts = path.split(".")
    return any("self == oldSelf" in rules_at(".".join(parts[:count])) for count in range(1, len(parts) + 1))


def test_only_replicas_and_suspend_may_change() -> None:
    leaves = [path for path, node in NODES.items() if path.startswith("spec.") and "properties" not in node]
    changeable = {path for path in leaves if "[]" not in path and "{}" not in path and not frozen(path)}
    assert changeable == {f"spec.{path}" for path in MUTABLE} == {"spec.suspend", "spec.workers.replicas"}


def test_a_field_without_default_neither_comes_nor_goes() -> None:
    """A transition rule of a field runs only where it is both before and after; its owner must watch the rest."""
    for owner in ("spec", "spec.workers"):
        node = NODES[owner]
        for name, inner in node["properties"].items():
            if "default" in inner or name in node.get("required", ()) or not frozen(f"{owner}.{name}"):
                continue
            assert f"has(self.{name}) == has(oldSelf.{name})" in rules_at(owner), name


def test_every_rule_names_its_fix() -> None:
    messages = [rule["message"] for node in NODES.values() for rule in node.get("x-kubernetes-validations", ())]
    assert len(messages) > 40
    assert all("; " in message and not message.endswith(".") for message in messages)


TYPES = {
    found.__name__: found
    for module in (data_types, model_types, policy_types, status_types, workers_types)
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, BaseModel)
} | {"TrainingJobSpec": TrainingJobSpec, "TrainingJobStatus": TrainingJobStatus}


def test_rules_and_keys_are_of_types_that_exist() -> None:
    assert set(RULES) <= set(TYPES)
    for (owner, field), key in LIST_KEYS.items():
        schema = TYPES[owner].model_json_schema(by_alias=True)
        assert field in schema["properties"], owner
        entries = [node for path, node in NODES.items() if path.endswith(f"{field}[]")]
        assert entries
        assert all(key in entry["required"] for entry in entries), (owner, field)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_type_with_a_validator_of_several_fields_has_rules(name: str) -> None:
    found = [
        path for path, node in NODES.items() if RULES[name][0].to_object() in node.get("x-kubernetes-validations", ())
    ]
    assert found, name


def test_types_with_validators_are_covered_by_rules() -> None:
    validated = {name for name, found in TYPES.items() if found.__pydantic_decorators__.model_validators}
    assert validated - {"TrainingJobSpec"} <= set(RULES)


def test_conditions_are_a_map_by_type() -> None:
    conditions = NODES["status.conditions"]
    assert conditions["x-kubernetes-list-type"] == "map"
    assert conditions["x-kubernetes-list-map-keys"] == ["type"]


def test_names_subresources_and_columns() -> None:
    crd = training_job_crd()
    version = crd["spec"]["versions"][0]
    assert crd["metadata"]["name"] == "trainingjobs.polyreme.dev"
    assert crd["spec"]["names"]["shortNames"] == ["tj"]
    assert crd["spec"]["names"]["categories"] == ["all", "training"]
    assert version["subresources"]["scale"]["specReplicasPath"] == ".spec.workers.replicas"
    assert version["subresources"]["status"] == {}
    for column in version["additionalPrinterColumns"]:
        path = column["jsonPath"]
        assert "[-1" not in path
        assert "[0" not in path
        head = path.partition("[?")[0].removeprefix(".")
        assert head in NODES or head.startswith("metadata."), path


def test_columns_read_conditions_that_the_operator_writes() -> None:
    columns = training_job_crd()["spec"]["versions"][0]["additionalPrinterColumns"]
    kinds = {found[1] for column in columns if (found := re.search(r'@\.type=="(\w+)"', column["jsonPath"]))}
    assert kinds == {"Queued", "Running", "Succeeded", "Failed"}
    assert kinds <= {kind.value for kind in ConditionType}


def test_the_default_of_an_object_with_rules_obeys_them_as_it_stands() -> None:
    """The API server checks a default before it fills what is nested in it (``no such key: mode``)."""
    assert NODES["spec.parallelism"]["default"] == {"mode": "Auto"}
