"""A malformed pod template stops only its own job, which gets the reason."""

import asyncio
from typing import Any

import pytest

from tests.unit.operator.operator_stage import Stage, node_manifest

PATIENCE_S = 10.0
TAINT = {"key": "team", "value": "vision", "effect": "NoSchedule"}
NODE_AFFINITY = "requiredDuringSchedulingIgnoredDuringExecution"


def with_terms(terms: object) -> dict[str, Any]:
    return {"affinity": {"nodeAffinity": {NODE_AFFINITY: {"nodeSelectorTerms": terms}}}}


TEMPLATES: tuple[object, ...] = (
    "oops",
    {"spec": "oops"},
    {"metadata": []},
    {"metadata": {"labels": ["a"]}},
    {"spec": {"affinity": "spread"}},
    {"spec": {"affinity": {"nodeAffinity": "near"}}},
    {"spec": {"tolerations": {"key": "team"}}},
    {"spec": {"tolerations": ["team"]}},
    {"spec": {"nodeSelector": []}},
    {"spec": {"nodeSelector": ["a"]}},
    {"spec": {"initContainers": ["x"]}},
    {"spec": {"containers": "x"}},
    {"spec": {"containers": [{"env": "x"}]}},
    {"spec": {"containers": [{"resources": {"requests": ["cpu"]}}]}},
    {"spec": {"overhead": "x"}},
    {"spec": {"volumes": 7}},
    {"spec": with_terms("x")},
    {"spec": with_terms(["x"])},
    {"spec": with_terms([{"matchExpressions": [{"key": ["a"], "operator": "In", "values": 7}]}])},
    {"spec": with_terms([{"matchExpressions": [None]}])},
    {"spec": with_terms([{"matchFields": [{"key": "metadata.name", "operator": "In", "values": [{}]}]}])},
    {"spec": {"containers": [{"resources": {"requests": {"cpu": "1e999999"}}}]}},
    {"spec": {"containers": [{"resources": {"limits": {"memory": 1e300}}}]}},
)


@pytest.mark.parametrize("template", TEMPLATES, ids=str)
def test_a_malformed_template_blocks_no_other_job(template: object) -> None:
    stage = Stage()
    stage.add_nodes(2, taints=[TAINT])

    async def story() -> None:
        stage.add_job("malformed", template)
        await asyncio.sleep(1.0)
        stage.add_job("fine", {"spec": {"tolerations": [{"key": "team", "operator": "Exists"}]}})
        await asyncio.sleep(PATIENCE_S)
        failed = stage.condition("malformed", "Failed")
        assert failed["reason"] == "Misconfigured"
        assert failed["message"].startswith("spec.workers.template")
        assert stage.condition("fine", "Admitted")["status"] == "True"

    stage.run(story)


@pytest.mark.parametrize("taint", [{"key": 1.5}, {"key": "team", "value": 7}, {"key": "team", "effect": []}], ids=str)
def test_a_node_with_a_malformed_taint_stops_no_job(taint: dict[str, Any]) -> None:
    stage = Stage()
    stage.add_nodes(1, taints=[{**TAINT, **taint}])
    stage.store.create(node_manifest("fine", 2))

    async def story() -> None:
        stage.add_job("job")
        await asyncio.sleep(PATIENCE_S)

    stage.run(story)
    assert stage.condition("job", "Admitted")["status"] == "True"
