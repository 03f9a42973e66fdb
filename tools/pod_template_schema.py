"""Write the types of a pod template's fields from the OpenAPI document of the Kubernetes that ``tools/cluster`` pins.

Run it after the pinned version has changed. The document is in Go's module cache once ``tools/cluster`` has built the
API server; ``--document PATH`` names another copy.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
PINS = Path("tools/cluster/go/kubernetes/go.mod")
OUTPUT = Path("api/polyreme_api/pod_template/kubernetes.json")
TEMPLATE = "io.k8s.api.core.v1.PodTemplateSpec"
SCALARS = {
    "io.k8s.apimachinery.pkg.api.resource.Quantity": "quantity",
    "io.k8s.apimachinery.pkg.util.intstr.IntOrString": "intOrString",
    "io.k8s.apimachinery.pkg.apis.meta.v1.Time": "string",
    "io.k8s.apimachinery.pkg.apis.meta.v1.FieldsV1": "object",
}
"""Definitions that are no objects with fields."""


def main(arguments: list[str]) -> int:
    """Write the file."""
    parser = argparse.ArgumentParser(description="write the types of a pod template's fields")
    parser.add_argument("--document", type=Path, help="OpenAPI document of Kubernetes (swagger.json)")
    document = parser.parse_args(arguments).document or pinned_document()
    if not document.exists():
        print(f"no OpenAPI document at {document}: run make cluster-up once, or give --document", file=sys.stderr)
        return 1
    text = render(json.loads(document.read_text(encoding="utf-8"))["definitions"], version=pinned_version())
    (ROOT / OUTPUT).write_text(text, encoding="utf-8")
    print(OUTPUT)
    return 0


def pinned_version() -> str:
    """Return the version of Kubernetes that is pinned, as ``v1.36.3``."""
    found = re.search(r"k8s\.io/kubernetes (v\S+)", (ROOT / PINS).read_text(encoding="utf-8"))
    assert found is not None, f"{PINS} requires k8s.io/kubernetes"
    return found[1]


def pinned_document() -> Path:
    """Return where Go keeps the OpenAPI document of that version."""
    cache = os.environ.get("GOMODCACHE") or str(Path(os.environ.get("GOPATH") or Path.home() / "go") / "pkg/mod")
    return Path(cache, f"k8s.io/kubernetes@{pinned_version()}", "api/openapi-spec/swagger.json")


def render(definitions: dict[str, Any], *, version: str) -> str:
    """Write the file: one type a line, so that changes can be read."""
    types = _types(definitions)
    rows = ",\n".join(f"  {json.dumps(name)}: {json.dumps(fields)}" for name, fields in sorted(types.items()))
    head = json.dumps({"kubernetes": version, "root": _short(TEMPLATE), "sha256": digest(types)})
    return f'{head[:-1]}, "types": {{\n{rows}\n}}}}\n'


def digest(types: dict[str, Any]) -> str:
    """Return a digest of the types, by which an edit by hand is found."""
    return hashlib.sha256(json.dumps(types, sort_keys=True).encode()).hexdigest()


def _types(definitions: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the fields of every type that a pod template leads to, by the type's short name."""
    types: dict[str, dict[str, Any]] = {}
    full_names: dict[str, str] = {}
    left = [TEMPLATE]
    while left:
        name = left.pop()
        if (known := full_names.setdefault(_short(name), name)) != name:
            raise ValueError(f"{known} and {name} have the same short name; give one of them another")
        if _short(name) in types:
            continue
        fields = definitions[name]["properties"]
        types[_short(name)] = {field: _type_of(part, left) for field, part in sorted(fields.items())}
    return types


def _type_of(part: dict[str, Any], left: list[str]) -> Any:
    if "$ref" in part:
        name = part["$ref"].rsplit("/", 1)[1]
        if name in SCALARS:
            return SCALARS[name]
        left.append(name)
        return _short(name)
    if part["type"] == "array":
        return ["list", _type_of(part["items"], left)]
    if part["type"] == "object":
        values = part.get("additionalProperties")
        return ["map", _type_of(values, left)] if values else "object"
    return part["format"] if part["type"] == "integer" else part["type"]


def _short(name: str) -> str:
    return name.rsplit(".", 1)[1]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
