"""No setting is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.preflight import warnings
from polyreme_api.job import parse_job

SAMPLE = Path(__file__).parents[3] / "manifests" / "samples" / "quickstart.yaml"


def said(**changes: Any) -> list[str]:
    manifest = yaml.safe_load(SAMPLE.read_text())
    workers = {**manifest["spec"]["workers"], **changes.pop("workers", {})}
    manifest["spec"] = {**manifest["spec"], **changes, "workers": workers}
    return warnings(parse_job(manifest))


def test_a_job_that_gets_all_it_asks_for_is_not_warned() -> None:
    assert said() == []


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"topology": {"required": "rack"}}, "spec.topology.required"),
        ({"workers": {"minReplicas": 1}}, "spec.workers.minReplicas"),
        ({"workers": {"maxReplicas": 4}}, "spec.workers.maxReplicas"),
        ({"priorityClassName": "high"}, "spec.priorityClassName"),
        ({"preemptionPolicy": "Never"}, "spec.preemptionPolicy"),
        ({"minRuntimeSeconds": 60}, "spec.minRuntimeSeconds"),
    ],
)
def test_a_field_that_nothing_reads_yet_is_named(changes: dict[str, Any], field: str) -> None:
    assert said(**changes) == [f"this version takes these fields and does nothing with them yet: {field}"]


def test_fields_of_the_template_are_named_in_one_warning() -> None:
    container = {"image": "mine", "resources": {"limits": {"cpu": "1"}}}
    words = said(workers={"template": {"spec": {"containers": [container], "nodeSelector": {"a": "b"}}}})
    assert len(words) == 1
    assert all(field in words[0] for field in ("image", "resources", "nodeSelector"))
