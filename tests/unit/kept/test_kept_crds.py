"""Objects that an older version stored are accepted whole by today's CRDs, and the old CRDs lose nothing in today's."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.crd.definitions import DEFINITIONS, crd
from tests.kept.folders import VERSIONS, read_cluster

Schema = dict[str, Any]
FREE = "x-kubernetes-preserve-unknown-fields"
INT_OR_STRING = "x-kubernetes-int-or-string"
LOWER_BOUNDS = ("minimum", "minLength", "minItems", "minProperties")
UPPER_BOUNDS = ("maximum", "maxLength", "maxItems", "maxProperties")
LEAST = {"minimum": -math.inf}
TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "integer": int,
    "number": (int, float),
    "boolean": bool,
}
NARROWED = {
    # Kubernetes itself allows no longer key.
    "TrainingJob.spec.workers.template.spec.tolerations[].key: maxLength is 317",
    # A job that has more keeps running: the server checks only what changes, and a template never does.
    "TrainingJob.spec.workers.template.spec.tolerations: maxItems is 128",
}
"""Bounds that came later: rules in CEL need them, and they take nothing from a job that exists."""
TODAY = {definition.kind: crd(definition) for definition in DEFINITIONS}

pytestmark = pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version.name)


def schema_of(definition: dict[str, Any]) -> Schema:
    schema: Schema = definition["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    return schema


def kept_crds(version: Path) -> dict[str, dict[str, Any]]:
    """The definitions by kind."""
    texts = [path.read_text() for path in sorted((version / "crds").glob("*.yaml"))]
    found = [yaml.load(text, Loader=yaml.CSafeLoader) for text in texts]
    return {definition["spec"]["names"]["kind"]: definition for definition in found}


def losses(old: Schema, new: Schema, path: str = "") -> Iterator[str]:
    """What the old schema accepts or keeps and the new one does not; rules in CEL are not compared."""
    if old.get("type") != new.get("type"):
        yield f"{path}: type {old.get('type')} is {new.get('type')}"
        return
    yield from (f"{path}{loss}" for loss in value_losses(old, new))
    for name, inner in old.get("properties", {}).items():
        if name in new.get("properties", {}):
            yield from losses(inner, new["properties"][name], f"{path}.{name}")
        elif not new.get(FREE):
            yield f"{path}: {name} is missing"
    for part in ("items", "additionalProperties"):
        if part in old:
            yield from losses(old[part], new.get(part, {}), f"{path}[]")


def value_losses(old: Schema, new: Schema) -> Iterator[str]:
    """The same for one value, whatever lies inside it."""
    if old.get(FREE, False) and not new.get(FREE, False):
        yield ": unknown fields are lost"
    if "pattern" in new and "pattern" not in old:
        yield ": has a pattern"
    for name in sorted(set(new.get("required", ())) - set(old.get("required", ()))):
        yield f": {name} is required"
    if "enum" in new:
        yield from (f": {value} is no value" for value in sorted(set(old.get("enum", ["any"])) - set(new["enum"])))
    bounds = [name for name in LOWER_BOUNDS if name in new and new[name] > old.get(name, LEAST.get(name, 0))]
    bounds += [name for name in UPPER_BOUNDS if name in new and new[name] < old.get(name, math.inf)]
    yield from (f": {name} is {new[name]}" for name in bounds)


def refusals(schema: Schema, value: Any, path: str = "") -> Iterator[str]:
    """Why the API server would refuse a value or drop a part of it."""
    wanted = (int, str) if INT_OR_STRING in schema else TYPES.get(schema.get("type", ""), object)
    if not isinstance(value, wanted) or (isinstance(value, bool) and wanted is not bool):
        yield f"{path}: {value!r} is of another type"
        return
    yield from (f"{path}: {refusal}" for refusal in value_refusals(schema, value))
    if isinstance(value, list):
        for inner in value:
            yield from refusals(schema["items"], inner, f"{path}[]")
    elif isinstance(value, dict):
        inner_schemas, others = schema.get("properties", {}), schema.get("additionalProperties")
        for name, inner in value.items():
            if (inner_schema := inner_schemas.get(name, others)) is not None:
                yield from refusals(inner_schema, inner, f"{path}.{name}")
            elif inner_schemas and not schema.get(FREE):
                yield f"{path}: {name} is dropped"


def value_refusals(schema: Schema, value: Any) -> Iterator[str]:
    """The same for one value, whatever lies inside it."""
    if "enum" in schema and value not in schema["enum"]:
        yield f"{value!r} is none of {schema['enum']}"
    if "pattern" in schema and not re.search(schema["pattern"], str(value)):
        yield f"{value!r} does not match {schema['pattern']}"
    if isinstance(value, dict):
        yield from (f"{name} is missing" for name in schema.get("required", ()) if name not in value)
    size = value if isinstance(value, int | float) else len(value)
    if any(size < schema.get(name, size) for name in LOWER_BOUNDS):
        yield f"{size} is too little"
    if any(size > schema.get(name, size) for name in UPPER_BOUNDS):
        yield f"{size} is too much"


def test_names_scope_and_versions_are_those_of_then(version: Path) -> None:
    for kind, old in kept_crds(version).items():
        new = TODAY[kind]
        assert new["metadata"]["name"] == old["metadata"]["name"]
        for field in ("group", "names", "scope"):
            assert new["spec"][field] == old["spec"][field], kind
        served = {each["name"] for each in new["spec"]["versions"] if each["served"]}
        assert {each["name"] for each in old["spec"]["versions"]} <= served, kind
        for each in old["spec"]["versions"]:
            assert each["subresources"].items() <= new["spec"]["versions"][0]["subresources"].items(), kind


def test_no_field_and_no_value_of_then_is_lost(version: Path) -> None:
    kept = kept_crds(version)
    assert len(kept) >= 4
    found = {f"{kind}{loss}" for kind, old in kept.items() for loss in losses(schema_of(old), schema_of(TODAY[kind]))}
    assert found - NARROWED == set()


def test_every_stored_object_is_accepted_whole(version: Path) -> None:
    stored = [manifest for manifest in read_cluster(version)["objects"] if manifest["kind"] in TODAY]
    assert len({manifest["kind"] for manifest in stored}) >= 3
    assert [
        f"{manifest['kind']} {manifest['metadata']['name']}{refusal}"
        for manifest in stored
        for refusal in refusals(
            schema_of(TODAY[manifest["kind"]]), {name: part for name, part in manifest.items() if name != "metadata"}
        )
    ] == []
