"""JSON schemas of Kubernetes' kinds for kubeconform, from an API server's own OpenAPI document."""

import copy
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

PREFIX = "#/definitions/"
LOCATION = "{{.Group}}-{{.ResourceAPIVersion}}-{{.ResourceKind}}.json"
"""Name of a schema's file, as kubeconform's template; the group of the core kinds is their version there."""
# The document calls both text; the server takes numbers, too.
_TEXT_OR_NUMBER = ("io.k8s.apimachinery.pkg.api.resource.Quantity", "io.k8s.apimachinery.pkg.util.intstr.IntOrString")

Schema = dict[str, Any]


def write(document: Mapping[str, Any], folder: Path) -> int:
    """Write a schema for each kind of a document (``/openapi/v2``); return how many there are."""
    definitions: dict[str, Schema] = {name: _strict(schema) for name, schema in document["definitions"].items()}
    for name in _TEXT_OR_NUMBER:
        definitions[name] = {"type": ["string", "number"]}
    written = 0
    for name, schema in definitions.items():
        for kind in schema.get("x-kubernetes-group-version-kind", ()):
            used = {one: definitions[one] for one in _closure(name, definitions)}
            group = kind["group"] or kind["version"]
            file = folder / f"{group}-{kind['version']}-{kind['kind'].lower()}.json"
            file.write_text(json.dumps({"$ref": PREFIX + name, "definitions": used}))
            written += 1
    return written


def _strict(schema: Schema) -> Schema:
    """Refuse fields that an object does not have."""
    strict = copy.deepcopy(schema)
    if "properties" in strict and not strict.get("x-kubernetes-preserve-unknown-fields"):
        strict.setdefault("additionalProperties", False)
    return strict


def _closure(name: str, definitions: Mapping[str, Schema]) -> set[str]:
    found, open_ = {name}, [name]
    while open_:
        for reference in _references(definitions[open_.pop()]):
            if reference not in found:
                found.add(reference)
                open_.append(reference)
    return found


def _references(node: Any) -> Iterator[str]:
    if isinstance(node, dict):
        if isinstance(reference := node.get("$ref"), str):
            yield reference.removeprefix(PREFIX)
        for value in node.values():
            yield from _references(value)
    elif isinstance(node, list):
        for value in node:
            yield from _references(value)
