"""The chart's own files agree with what they are about: versions, metrics, runbooks, values. Needs no Helm."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_operator.publishing.alerts import AlertKind

ROOT = Path(__file__).parents[2]
CHART = ROOT / "charts/polyreme"
METRICS_PAGE = ROOT / "docs/reference/metrics.md"
RUNBOOK = ROOT / "docs/runbooks/alerts.md"
METRIC = re.compile(r"\bpolyreme_[a-z_]+\b")
HISTOGRAM_PARTS = ("_bucket", "_sum", "_count")


def read(name: str) -> Any:
    return yaml.safe_load((CHART / name).read_text(encoding="utf-8"))


def rules() -> list[dict[str, Any]]:
    return [rule for group in read("files/rules.yaml")["groups"] for rule in group["rules"]]


def panels() -> list[dict[str, Any]]:
    dashboard = json.loads((CHART / "files/dashboard.json").read_text(encoding="utf-8"))
    return list(dashboard["panels"])


def documented() -> dict[str, str]:
    """Type of each metric, by its name."""
    return dict(re.findall(r"^\| `(polyreme_\w+)` \| (\w+) \|", METRICS_PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def unknown(expression: str) -> list[str]:
    """Metrics of an expression that the reference lacks, or that it uses as another type."""
    types = documented()
    wrong = []
    for name in METRIC.findall(expression):
        base = next((name.removesuffix(part) for part in HISTOGRAM_PARTS if name.endswith(part)), name)
        if types.get(name) not in {"gauge", "counter"} and types.get(base) != "histogram":
            wrong.append(name)
    return wrong


def test_the_chart_has_the_version_of_the_project() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = read("Chart.yaml")
    assert (chart["version"], chart["appVersion"]) == (version, version)


def test_every_metric_of_an_alert_or_a_panel_exists() -> None:
    expressions = [rule["expr"] for rule in rules()]
    expressions += [target["expr"] for panel in panels() for target in panel["targets"]]
    assert len(expressions) > 30
    assert {name for expression in expressions for name in unknown(expression)} == set()
    assert unknown("rate(polyreme_leaders[5m])") == ["polyreme_leaders"]
    assert unknown("polyreme_scheduling_cycle_seconds_bucket + polyreme_leader") == []


def test_each_alert_has_its_section_of_the_runbook_and_each_section_its_alert() -> None:
    headings = re.findall(r"^## (\w+)$", RUNBOOK.read_text(encoding="utf-8"), re.MULTILINE)
    assert headings == [rule["alert"] for rule in rules()]
    for rule in rules():
        assert rule["annotations"]["runbook_url"] == f"docs/runbooks/alerts.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in {"warning", "critical"}
        assert {"summary", "description"} <= set(rule["annotations"])


def test_each_kind_of_the_webhook_has_an_alert_and_the_example_routes_it_with_its_runbook() -> None:
    example = yaml.safe_load((ROOT / "examples/alertmanager.yaml").read_text(encoding="utf-8"))
    (route,) = example["route"]["routes"]
    named = set(re.findall(r"Polyreme\w+", route["matchers"][0]))
    assert named == {f"Polyreme{kind}" for kind in AlertKind}
    assert named <= {rule["alert"] for rule in rules()}
    receiver = next(each for each in example["receivers"] if each["name"] == route["receiver"])
    assert "{{ .Annotations.runbook_url }}" in receiver["slack_configs"][0]["text"]


def test_each_critical_alert_has_a_rule_test() -> None:
    tested = {
        case["alertname"]
        for story in read("rules-test.yaml")["tests"]
        for case in story["alert_rule_test"]
        if case["exp_alerts"]
    }
    assert {rule["alert"] for rule in rules() if rule["labels"]["severity"] == "critical"} <= tested


def test_panels_of_the_dashboard_do_not_overlap_and_name_the_data_source_of_its_variable() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in panels():
        at = panel["gridPos"]
        cells = {(at["x"] + x, at["y"] + y) for x in range(at["w"]) for y in range(at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
    assert len({panel["id"] for panel in panels()}) == len(panels())


def closed(schema: Any, path: str = "values") -> list[str]:
    """Objects of a schema that take unknown keys."""
    if isinstance(schema, list):
        return [found for at, one in enumerate(schema) for found in closed(one, f"{path}[{at}]")]
    if not isinstance(schema, dict):
        return []
    found = [path] if "properties" in schema and schema.get("additionalProperties") is not False else []
    return found + [one for key, value in schema.items() for one in closed(value, f"{path}.{key}")]


def undescribed(values: dict[str, Any], schema: dict[str, Any], path: str = "") -> list[str]:
    """Values that a schema does not name."""
    found = []
    for name, value in values.items():
        inner = schema["properties"].get(name)
        if inner is None:
            found.append(f"{path}{name}")
        elif "properties" in inner:
            found += undescribed(value, inner, f"{path}{name}.")
    return found


def test_the_schema_of_the_values_takes_no_unknown_key_and_describes_every_value() -> None:
    schema = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
    assert closed(schema) == []
    assert set(schema["properties"]) == set(read("values.yaml"))
    assert undescribed(read("values.yaml"), schema) == []
    assert undescribed({"operator": {"replica": 1}}, schema) == ["operator.replica"]


def test_settings_of_all_pods_may_be_set_for_each_component() -> None:
    """But those of security for the agent, whose two containers differ, and what concerns images and labels of all."""
    properties = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))["properties"]
    shared = {*properties["global"]["properties"]} - {"imageRegistry", "imagePullSecrets", "commonLabels"}
    datahub = properties["datahub"]["properties"]
    pools = datahub["workers"]["properties"]
    for component in (properties["operator"], datahub["controller"], pools["cpu"], pools["gpu"]):
        assert shared <= set(component["properties"])
    assert shared - set(properties["agent"]["properties"]) == {"podSecurityContext", "securityContext"}


@pytest.mark.parametrize("open_", [{"properties": {"a": {"properties": {}}}, "additionalProperties": False}])
def test_an_open_object_is_found(open_: dict[str, Any]) -> None:
    assert closed(open_) == ["values.properties.a"]
