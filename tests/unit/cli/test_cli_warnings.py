"""No setting is dropped in silence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.local_run.preflight import warnings
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
        ({"queueName": "research"}, "spec.queueName"),
        ({"priorityClassName": "high"}, "spec.priorityClassName"),
        ({"preemptionPolicy": "Never"}, "spec.preemptionPolicy"),
        ({"minRuntimeSeconds": 60}, "spec.minRuntimeSeconds"),
    ],
)
def test_a_field_without_effect_on_one_machine_is_named(changes: dict[str, Any], field: str) -> None:
    assert said(**changes) == [f"these fields have no effect on one machine: {field}"]


def test_an_elastic_job_is_not_warned_since_the_devices_of_one_machine_bound_it_too() -> None:
    assert said(workers={"minReplicas": 1, "maxReplicas": 4}) == []


def test_more_ranks_than_cores_can_bear_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    assert said(workers={"replicas": 4, "devices": 2}) == []
    (words,) = said(workers={"replicas": 16, "devices": 2})
    assert words.startswith("32 ranks share 2 cores")


def test_fields_of_the_template_are_named_in_one_warning() -> None:
    container = {"image": "mine", "resources": {"limits": {"cpu": "1"}}}
    words = said(workers={"template": {"spec": {"containers": [container], "nodeSelector": {"a": "b"}}}})
    assert len(words) == 1
    assert all(field in words[0] for field in ("image", "resources", "nodeSelector"))
