"""Files that are generated from the API's types say what the types say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.crd.definitions import DEFINITIONS, JOB, Definition, crd
from polyreme_api.crd.pod_template import KEEPS_UNKNOWN
from tools import generate_crds, pod_template_schema
from tools.generate_crds import (
    CRDS,
    DIGEST_ANNOTATION,
    ROOT,
    VERSION_ANNOTATION,
    annotated,
    crd_path,
    outputs,
    page_path,
)


@pytest.mark.parametrize("path", sorted(outputs()), ids=str)
def test_a_generated_file_is_fresh(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == outputs()[path], "stale; run make docs"


def test_there_is_a_file_and_a_page_for_each_kind_and_for_nothing_else() -> None:
    files = {crd_path(one) for one in DEFINITIONS}
    assert {path.relative_to(ROOT) for path in (ROOT / CRDS).glob("*.yaml")} == files
    assert set(outputs()) == {page_path(one) for one in DEFINITIONS} | files


def test_kubectl_apply_of_the_folder_brings_every_kind() -> None:
    """It reads files in the order of their names and no subfolders: links stand for the CRDs and the namespace."""
    first, *links = sorted(path for path in (ROOT / "manifests").glob("*.yaml") if path.is_symlink())
    assert first.resolve() == (ROOT / "manifests/namespace.yaml").resolve()
    assert first == min((ROOT / "manifests").glob("*.yaml"))
    stored = sorted((ROOT / CRDS).resolve().glob("*.yaml"))
    assert sorted(link.resolve() for link in links) == stored
    assert sorted(link.resolve() for link in (ROOT / "manifests/crds").glob("*.yaml")) == stored


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
def test_the_file_holds_the_crd(definition: Definition) -> None:
    held = yaml.safe_load((ROOT / crd_path(definition)).read_text(encoding="utf-8"))
    assert held == annotated(crd(definition))
    del held["metadata"]["annotations"]
    assert held == crd(definition)


def test_another_content_has_another_digest() -> None:
    one, other = (annotated(crd(definition)) for definition in DEFINITIONS[:2])
    assert one["metadata"]["annotations"][VERSION_ANNOTATION] == other["metadata"]["annotations"][VERSION_ANNOTATION]
    assert one["metadata"]["annotations"][DIGEST_ANNOTATION] != other["metadata"]["annotations"][DIGEST_ANNOTATION]


def test_numbers_that_are_text_are_quoted_for_readers_of_yaml_1_2() -> None:
    """``1e-8`` is text in YAML 1.1, which PyYAML writes, and a number in 1.2, which the API server reads."""
    text = (ROOT / crd_path(JOB)).read_text(encoding="utf-8")
    assert 'default: "1e-8"' in text
    assert 'default: "1e-3"' in text


def test_the_types_of_pod_templates_are_those_of_the_pinned_kubernetes() -> None:
    """Without Go: the file names the version, and a digest of the types finds an edit by hand."""
    kept = json.loads((ROOT / pod_template_schema.OUTPUT).read_text(encoding="utf-8"))
    assert kept["kubernetes"] == pod_template_schema.pinned_version(), "run tools/pod_template_schema.py"
    assert kept["sha256"] == pod_template_schema.digest(kept["types"])


def test_types_are_taken_from_an_openapi_document() -> None:
    reference = {"$ref": "#/definitions/io.k8s.api.core.v1.PodSpec"}
    quantity = {"$ref": "#/definitions/io.k8s.apimachinery.pkg.api.resource.Quantity"}
    properties = {
        "containers": {"type": "array", "items": {"type": "string"}},
        "overhead": {"type": "object", "additionalProperties": quantity},
        "priority": {"type": "integer", "format": "int32"},
    }
    definitions = {
        pod_template_schema.TEMPLATE: {"properties": {"spec": reference}},
        "io.k8s.api.core.v1.PodSpec": {"properties": properties},
    }
    assert json.loads(pod_template_schema.render(definitions, version="v1"))["types"] == {
        "PodTemplateSpec": {"spec": "PodSpec"},
        "PodSpec": {"containers": ["list", "string"], "overhead": ["map", "quantity"], "priority": "int32"},
    }


@pytest.mark.slow
def test_a_stale_file_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate_crds, "ROOT", tmp_path)
    assert generate_crds.main(["--check"]) == 1
    assert generate_crds.main([]) == 0
    assert generate_crds.main(["--check"]) == 0
    (tmp_path / crd_path(JOB)).write_text("old")
    assert generate_crds.main(["--check"]) == 1


@pytest.mark.parametrize("definition", DEFINITIONS, ids=lambda definition: definition.kind)
def test_the_page_names_every_field_of_the_spec(definition: Definition) -> None:
    page = outputs()[page_path(definition)]

    def names(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", {}))
        for inner in schema.get("properties", {}).values():
            if KEEPS_UNKNOWN in inner:
                # Kubernetes' own fields are on Kubernetes' own pages.
                continue
            found |= names(inner) | names(inner.get("items", {}))
        return found

    schema = crd(definition)["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert all(f"| `{name}` |" in page for name in names(schema["properties"]["spec"]))
