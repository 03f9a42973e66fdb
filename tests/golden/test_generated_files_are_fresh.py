"""Files that are generated from the API's types say what the types say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.job.crd import training_job_crd
from tools import generate_crds
from tools.generate_crds import CRD_PATH, ROOT, outputs


@pytest.mark.parametrize("path", sorted(outputs()), ids=str)
def test_a_generated_file_is_fresh(path: Path) -> None:
    assert (ROOT / path).read_text(encoding="utf-8") == outputs()[path], "stale; run make docs"


def test_the_file_holds_the_crd() -> None:
    assert yaml.safe_load((ROOT / CRD_PATH).read_text(encoding="utf-8")) == training_job_crd()


def test_numbers_that_are_text_are_quoted_for_readers_of_yaml_1_2() -> None:
    """``1e-8`` is text in YAML 1.1, which PyYAML writes, and a number in 1.2, which the API server reads."""
    text = (ROOT / CRD_PATH).read_text(encoding="utf-8")
    assert 'default: "1e-8"' in text
    assert 'default: "1e-3"' in text


@pytest.mark.slow
def test_a_stale_file_fails_the_check(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(generate_crds, "ROOT", tmp_path)
    assert generate_crds.main(["--check"]) == 1
    assert generate_crds.main([]) == 0
    assert generate_crds.main(["--check"]) == 0
    (tmp_path / CRD_PATH).write_text("old")
    assert generate_crds.main(["--check"]) == 1


def test_the_page_names_every_field_of_the_spec() -> None:
    page = outputs()[generate_crds.REFERENCE_PATH]

    def names(schema: dict[str, Any]) -> set[str]:
        found = set(schema.get("properties", {}))
        for inner in schema.get("properties", {}).values():
            found |= names(inner) | names(inner.get("items", {}))
        return found

    schema = training_job_crd()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
    assert all(f"| `{name}` |" in page for name in names(schema["properties"]["spec"]))
