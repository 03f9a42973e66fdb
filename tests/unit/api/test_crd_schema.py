"""The CRD: structural, bounded, with the rules of the types, and nothing that may change by mistake."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from pydantic import BaseModel

from polyreme_api import fault_policy as fault_types
from polyreme_api import fields as field_types
from polyreme_api import incident as incident_types
from polyreme_api import label_selector as selector_types
from polyreme_api import queue as queue_types
from polyreme_api import topology as topology_types
from polyreme_api.crd import translate
from polyreme_api.crd.definitions import (
    APPEND_ONLY,
    DEFINITIONS,
    JOB,
    LAST_MAY_CHANGE,
    MUTABLE,
    Definition,
    crd,
    object_schema,
)
from polyreme_api.crd.pod_template import KEEPS_UNKNOWN
from polyreme_api.crd.rule import Rule
from polyreme_api.crd.rules import LIST_KEYS, OBJECT_RULES, RULES, TEMPLATE_RULES, UNFILLED, UNTIL_ADMITTED
from polyreme_api.crd.training_rules import TRAINING_RULES
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus, parse_job
from polyreme_api.job import data as data_types
from polyreme_api.job import model as model_types
from polyreme_api.job import policy as policy_types
from polyreme_api.job import status as status_types
from polyreme_api.job import workers as workers_types
from tests.unit.api.jobs import job_with

Schema = dict[str, Any]
ALLOWED = {
    "type", "description", "default", "enum", "pattern", "minimum", "maximum", "minLength", "maxLength", "minItems",
    "maxItems", "minProperties", "maxProperties", "required", "properties", "items", "additionalProperties",
    "x-kubernetes-validations", "x-kubernetes-list-type", "x-kubernetes-list-map-keys",
    "x-kubernetes-preserve-unknown-fields", "x-kubernetes-map-type", "x-kubernetes-int-or-string",
}  # fmt: skip


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    """Every node of ours; what lies in a pod template is Kubernetes' own."""
    if KEEPS_UNKNOWN in schema:
        yield path, {name: part for name, part in schema.items() if name != "properties"}
        return
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}".removeprefix("."))
    if "items" in schema:
        yield from nodes(schema["items"], f"{path}[]")
    if "additionalProperties" in schema:
        yield from nodes(schema["additionalProperties"], f"{path}{{}}")


OF_KIND = {definition.kind: dict(nodes(object_schema(definition))) for definition in DEFINITIONS}
NODES = OF_KIND["TrainingJob"]
EVERY = [(f"{kind} {path}", path, node) for kind, found in OF_KIND.items() for path, node in found.items()]


def test_every_node_is_structural() -> None:
    for place, _, node in EVERY:
        if "x-kubernetes-int-or-string" in node:
            assert "type" not in node, place
        else:
            assert node["type"] in {"object", "array", "string", "integer", "boolean"}, place
        assert set(node) <= ALLOWED, place
        assert not {"properties", "additionalProperties"} <= set(node), place
        assert ("items" in node) == (node.get("type") == "array"), place
        assert set(node.get("required", ())) <= set(node.get("properties", ())), place


def test_every_string_list_and_map_is_bounded() -> None:
    for place, path, node in EVERY:
        if path in {"apiVersion", "kind", "metadata"}:
            continue
        match node:
            case {"type": "string"}:
                assert "maxLength" in node or "enum" in node, place
            case {"type": "array"}:
                assert "maxItems" in node, place
            case {"additionalProperties": _}:
                assert "maxProperties" in node, place


def test_every_number_of_a_spec_is_bounded() -> None:
    for place, path, node in EVERY:
        if path.startswith("spec") and node.get("type") == "integer":
            assert {"minimum", "maximum"} <= set(node), place


def test_only_the_pod_template_is_free_form() -> None:
    free = [place for place, _, node in EVERY if "x-kubernetes-preserve-unknown-fields" in node]
    assert free == ["TrainingJob spec.workers.template"]


def test_no_field_is_a_float() -> None:
    assert not [place for place, _, node in EVERY if node.get("type") == "number"]


def test_a_decimal_keeps_its_pattern() -> None:
    decimals = [
        node for path, node in NODES.items() if path.startswith("spec.training.optimizer.") and "maxLength" in node
    ]
    assert len(decimals) == 8
    assert all("pattern" in node for node in decimals)


def test_every_field_is_described_in_plain_words() -> None:
    for place, path, node in EVERY:
        if path == "" or path.endswith(("[]", "{}")) or path == "metadata":
            continue
        assert node.get("description"), place
        assert "``" not in node["description"], place


def test_names_are_camel_case() -> None:
    for _, _, node in EVERY:
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
        {"spec.checkpoint": {"keep": 2}, "spec.failurePolicy": {"backoff": {"maxSeconds": 60}}, "spec.topology": {}},
    ],
)
def test_the_api_server_fills_the_same_defaults_as_we_do(changes: dict[str, Any]) -> None:
    document = job_with(changes)
    ours = parse_job(document).to_object()["spec"]
    left_out = UNFILLED - document["spec"].keys()
    filled = apply_defaults(NODES["spec"], document["spec"])
    assert not left_out & filled.keys()
    assert without_empty(filled) == without_empty({name: part for name, part in ours.items() if name not in left_out})
    assert parse_job({**document, "spec": filled}).to_object()["spec"] == ours


def test_the_status_has_no_defaults() -> None:
    for found in OF_KIND.values():
        assert not [path for path, node in nodes(found["status"]) if "default" in node]


LISTS = {f"spec.{path}" for path in (*APPEND_ONLY, *LAST_MAY_CHANGE)}


def rules_at(path: str) -> list[str]:
    return [rule["rule"] for rule in NODES[path].get("x-kubernetes-validations", ())]


def test_what_an_administrator_owns_may_change() -> None:
    for definition in DEFINITIONS:
        rules = [rule["rule"] for place, _, node in EVERY for rule in node.get("x-kubernetes-validations", ())
                 if place.startswith(definition.kind)]  # fmt: skip
        assert any("oldSelf" in rule for rule in rules) == (definition.mutable is not None)


def test_only_replicas_suspend_what_damage_does_and_the_end_of_the_run_may_change() -> None:
    leaves = [path for path, node in NODES.items() if path.startswith("spec.") and "properties" not in node]
    outside = [path for path in leaves if "[]" not in path and "{}" not in path]
    changeable = {path for path in outside if "self == oldSelf" not in rules_at(path)}
    changeable -= {f"spec.{path}" for path in LAST_MAY_CHANGE}
    assert changeable == {f"spec.{path}" for path in (*MUTABLE, *APPEND_ONLY)}
    always = {"spec.suspend", "spec.workers.replicas", "spec.data.onDamage", "spec.data.schedule"}
    always |= {"spec.checkpoint.keep", "spec.training.steps"}
    always |= {f"spec.training.optimizer.{name}" for name in ("decaySteps", "finalLearningRate")}
    assert changeable == always | {f"spec.{name}" for name in UNTIL_ADMITTED}
    admitted, finished = (rule for rule in rules_at("") if "oldSelf" in rule)
    assert "oldSelf.status.completedAt" in finished
    assert all(f"self.spec.{name} == oldSelf.spec.{name}" in admitted for name in UNTIL_ADMITTED)
    (kept,) = rules_at("spec.data.schedule")
    assert kept.endswith("self.filter(e, e.fromStep <= oldSelf[size(oldSelf) - 1].fromStep) == oldSelf")


def test_a_field_without_default_neither_comes_nor_goes() -> None:
    """A transition rule of a field runs only where it is both before and after; its owner must watch the rest."""
    for owner, node in NODES.items():
        if not owner.startswith("spec") or "[]" in owner or "{}" in owner or "properties" not in node:
            continue
        fields = node["properties"].items()
        always = {name for name, inner in fields if "default" in inner or name in node.get("required", ())}
        kept = [rule for rule in rules_at(owner) if "size(dyn(oldSelf))" in rule]
        assert len(kept) == (len(always) < len(fields)), owner
        for name in [] if not kept else node["properties"].keys() - always:
            assert f"(!has(self.{name}) || has(oldSelf.{name}))" in kept[0], f"{owner}.{name}"
            assert f"(size(dyn(self)) == {len(always)} || " in kept[0], owner
        assert not {f"{owner}.{name}" for name, _ in fields if name not in always} & {
            f"spec.{path}" for path in (*MUTABLE - {"training.steps"}, *APPEND_ONLY)
        }, "it could neither come nor go"


def test_a_value_that_may_not_change_names_no_field() -> None:
    """The server runs every transition rule at every write of a status, and for a field named lists all of them."""
    for path in NODES.keys() - {""}:
        for rule in (rule for rule in rules_at(path) if "oldSelf" in rule and path not in LISTS):
            assert rule == "self == oldSelf" or rule.startswith("size(dyn(self)) == size(dyn(oldSelf)) && "), path
        assert "properties" not in NODES[path] or "self == oldSelf" not in rules_at(path), path


def test_a_rule_of_fields_that_may_be_missing_looks_for_none_where_there_is_none() -> None:
    """An object with nothing but what it always has costs no look at its fields, but where one of these decides."""
    for owner in ("spec", "spec.parallelism", "spec.topology", "spec.workers"):
        always = sum("default" in inner for inner in NODES[owner]["properties"].values())
        guarded = f"size(dyn(self)) == {always} || ("
        rules = [rule for rule in rules_at(owner) if "oldSelf" not in rule]
        looking = [rule.split(" == ")[0] for rule in rules if not rule.startswith(guarded)]
        decided = {
            "spec": ["self.workers.runtime.mode"],
            "spec.parallelism": ["self.mode != 'Explicit' || has(self.dp)"],
        }
        assert looking == decided.get(owner, []), owner


def test_a_rule_that_would_never_be_asked_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Whole(field_types.Part):
        steps: int = 1

    monkeypatch.setitem(RULES, "Whole", (Rule(rule="self.steps > 0", words="steps", of_optional=True),))
    with pytest.raises(ValueError, match="would never be asked"):
        translate.schema_of(Whole, with_defaults=True, mode="validation")


def test_every_rule_names_its_fix() -> None:
    rules = [rule for _, _, node in EVERY for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) > 25
    for rule in rules:
        words = rule["message"] if "message" in rule else rule["messageExpression"].split("'")[1].replace("%s", "x")
        assert "; " in words, rule
        assert not words.endswith("."), rule
        assert not any(leftover in words for leftover in ("{", "}", "  ", " ;")), rule


def test_every_rule_across_fields_says_the_value_that_it_saw() -> None:
    for rules in (*RULES.values(), *OBJECT_RULES.values(), *TEMPLATE_RULES.values()):
        for rule in rules:
            assert ".format([" in rule.to_object()["messageExpression"], rule


TYPES = {
    found.__name__: found
    for module in (
        data_types,
        fault_types,
        field_types,
        incident_types,
        model_types,
        policy_types,
        queue_types,
        selector_types,
        status_types,
        topology_types,
        workers_types,
    )
    for found in vars(module).values()
    if isinstance(found, type) and issubclass(found, BaseModel)
} | {"TrainingJobSpec": TrainingJobSpec, "TrainingJobStatus": TrainingJobStatus}


def test_rules_and_keys_are_of_types_that_exist() -> None:
    assert set(RULES) <= set(TYPES)
    lost = [name for name, rules in TRAINING_RULES.items() if RULES[name][: len(rules)] != rules]
    assert lost == [], "rules of both modules add up"
    for (owner, field), key in LIST_KEYS.items():
        schema = TYPES[owner].model_json_schema(by_alias=True)
        assert field in schema["properties"], owner
        entries = [
            inner["items"]
            for _, _, node in EVERY
            for name, inner in node.get("properties", {}).items()
            if name == field and inner.get("x-kubernetes-list-map-keys") == [key]
        ]
        assert entries
        assert all(key in entry["required"] for entry in entries), (owner, field)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_type_with_a_validator_of_several_fields_has_rules(name: str) -> None:
    said = [rule.get("message") for _, _, node in EVERY for rule in node.get("x-kubernetes-validations", ())]
    assert all(rule.message in said for rule in RULES[name]), name


def test_types_with_validators_are_covered_by_rules() -> None:
    validated = {name for name, found in TYPES.items() if found.__pydantic_decorators__.model_validators}
    assert validated <= set(RULES) | set(OBJECT_RULES)


def test_what_one_writer_writes_whole_has_one_owner() -> None:
    for kind, found in OF_KIND.items():
        atomic = {path for path, node in found.items() if node.get("x-kubernetes-map-type") == "atomic"}
        template = {"spec.workers.template"} if kind == "TrainingJob" else set()
        assert atomic == {"status"} | template, kind


def test_conditions_are_a_map_by_type() -> None:
    for found in OF_KIND.values():
        if "status.conditions" not in found:
            continue
        conditions = found["status.conditions"]
        assert conditions["x-kubernetes-list-type"] == "map"
        assert conditions["x-kubernetes-list-map-keys"] == ["type"]


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
def test_names_subresources_and_columns(definition: Definition) -> None:
    manifest = crd(definition)
    version, names = manifest["spec"]["versions"][0], manifest["spec"]["names"]
    assert manifest["metadata"]["name"] == f"{definition.plural}.polyreme.dev"
    assert "training" in names["categories"]
    assert ("all" in names["categories"]) == (manifest["spec"]["scope"] == "Namespaced") == (definition is JOB)
    assert version["subresources"]["status"] == {}
    for column in version["additionalPrinterColumns"]:
        path = column["jsonPath"].replace("[0]", "[]")
        assert "[-1" not in path
        head = path.partition("[?")[0].removeprefix(".")
        assert head in OF_KIND[definition.kind] or head.startswith("metadata."), path


def test_the_short_names_are_the_documented_ones() -> None:
    assert {definition.kind: definition.short_name for definition in DEFINITIONS} == {
        "TrainingJob": "tj", "TrainingQueue": "tq", "ClusterTopology": "ct", "NodeFaultPolicy": "nfp",
        "NodeIncident": "incident",
    }  # fmt: skip


def test_only_jobs_are_scaled() -> None:
    scaled = {definition.kind: definition.scale for definition in DEFINITIONS if definition.scale}
    assert set(scaled) == {"TrainingJob"}
    assert all(path.removeprefix(".") in NODES for path in scaled["TrainingJob"].values())


def test_the_default_of_an_object_with_rules_obeys_them_before_defaulting() -> None:
    """The API server checks a default before it fills what is nested in it (``no such key: mode``)."""
    assert NODES["spec.parallelism"]["default"] == {"mode": "Auto", "imagesOver": "Context"}


def test_words_that_would_end_a_text_in_cel_are_refused_before_an_api_server_does() -> None:
    with pytest.raises(ValueError, match="apostrophe"):
        Rule(rule="self.steps > 0", words="steps {self.steps} is a stage's").to_object()
