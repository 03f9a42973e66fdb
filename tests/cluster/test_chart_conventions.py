"""What users of well-known charts expect: one place for all pods' settings, no drift, egress to the ports in URLs."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from sqlalchemy.dialects.postgresql.psycopg2 import PGDialect_psycopg2
from sqlalchemy.engine import make_url

from tests.cluster.kube import kubectl
from tools.charts.render import CHART, EXAMPLES, NAMESPACE, VALUES, rendered

Manifest = dict[str, Any]
WORKLOADS = ("Deployment", "DaemonSet", "StatefulSet", "Job", "CronJob")
EVERYTHING = (
    "profile=production",
    "database.url=postgresql+psycopg2://db.example/polyreme",
    "objectStore.url=s3://bucket",
    "topics.url=pulsar://broker.example:6650/a/b",
    "datahub.workers.gpu.maxReplicas=1",
    "agent.enabled=true",
    "console.enabled=true",
    "console.url=https://polyreme.example.com",
)
NOT_SERVED = ("ServiceMonitor", "PrometheusRule")
"""Kinds of the Prometheus operator, which the cluster lacks."""
KEYED = frozenset(
    [
        *("containers", "initContainers", "env", "ports", "volumes", "volumeMounts", "imagePullSecrets"),
        "topologySpreadConstraints",
    ]
)
"""Lists of pods and Services whose elements the API server knows by a key, so that it may complete them."""


def objects(*values: Path, settings: tuple[str, ...] = (), crds: bool = False) -> list[Manifest]:
    """What the chart renders."""
    text = rendered(*values, settings=[f"crds.install={str(crds).lower()}", *settings])
    return [manifest for manifest in yaml.safe_load_all(text) if manifest]


def pods(manifests: list[Manifest]) -> dict[str, Manifest]:
    """Pod templates by the names of their owners."""
    return {each["metadata"]["name"]: each["spec"]["template"] for each in manifests if each["kind"] in WORKLOADS}


def containers(template: Manifest) -> list[Manifest]:
    return [*template["spec"].get("initContainers", ()), *template["spec"]["containers"]]


def set_json(**values: Any) -> tuple[str, ...]:
    """Settings of one of ``global``'s or a component's keys, as Helm takes a structure."""
    return tuple(word for path, value in values.items() for word in _flat(path.replace("__", "."), value))


def _flat(path: str, value: Any) -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _flat(f"{path}.{key.replace('.', chr(92) + '.')}", inner)
    elif isinstance(value, list):
        for at, inner in enumerate(value):
            yield from _flat(f"{path}[{at}]", inner)
    else:
        yield f"{path}={value}"


@pytest.mark.parametrize(
    ("key", "value", "found"),
    [
        ("nodeSelector", {"disk": "fast"}, lambda pod: pod["spec"].get("nodeSelector")),
        ("tolerations", [{"key": "infra", "operator": "Exists"}], lambda pod: pod["spec"].get("tolerations")),
        ("affinity", {"podAntiAffinity": {"a": "b"}}, lambda pod: pod["spec"].get("affinity")),
        ("priorityClassName", "high", lambda pod: pod["spec"].get("priorityClassName")),
        ("podAnnotations", {"team": "data"}, lambda pod: pod["metadata"].get("annotations")),
        ("terminationGracePeriodSeconds", 77, lambda pod: pod["spec"]["terminationGracePeriodSeconds"]),
    ],
)
def test_a_setting_for_all_pods_holds_for_each_component_that_has_none_of_its_own(
    key: str, value: Any, found: Any
) -> None:
    own = {"priorityClassName": {"polyreme-operator", "polyreme-agent"}}
    own |= {"tolerations": {"polyreme-agent"}, "terminationGracePeriodSeconds": {"polyreme-agent"}}
    templates = pods(objects(settings=(*EVERYTHING, *set_json(**{f"global__{key}": value}))))
    assert len(templates) == 6
    assert {name for name, pod in templates.items() if found(pod) != value} == own.get(key, set())


def test_variables_and_volumes_for_all_come_before_a_components_which_take_their_place() -> None:
    given = {
        "global__extraEnv": [{"name": "A", "value": "all"}, {"name": "POLYREME_HOME", "value": "/other"}],
        "global__extraEnvFrom": [{"configMapRef": {"name": "site"}}],
        "global__extraVolumes": [{"name": "site", "configMap": {"name": "site"}}],
        "global__extraVolumeMounts": [{"name": "site", "mountPath": "/site"}],
        "datahub__controller__extraEnv": [{"name": "A", "value": "own"}],
        # The name of 0.1.0.
        "operator__env": [{"name": "B", "value": "old"}],
    }
    templates = pods(objects(settings=(*EVERYTHING, *set_json(**given))))
    for name, template in templates.items():
        for container in template["spec"]["containers"]:
            names = [entry["name"] for entry in container["env"]]
            assert len(names) == len(set(names)), names
            env = {entry["name"]: entry.get("value") for entry in container["env"]}
            assert env["A"] == ("own" if name == "polyreme-datahub" else "all")
            assert env["POLYREME_HOME"] == "/other"
            assert env.get("B") == ("old" if name == "polyreme-operator" else None)
            assert container["envFrom"] == [{"configMapRef": {"name": "site"}}]
            assert {"name": "site", "mountPath": "/site"} in container["volumeMounts"]
        assert {"name": "site", "configMap": {"name": "site"}} in template["spec"]["volumes"]


def test_openshift_may_choose_every_user_and_group() -> None:
    text = json.dumps(pods(objects(Path(VALUES).with_name("openshift.yaml"))))
    assert not re.search(r'"(runAsUser|runAsGroup|fsGroup|supplementalGroups)"', text)
    assert text.count('"runAsNonRoot": true') == 3


@pytest.mark.parametrize("values", [VALUES, *EXAMPLES], ids=lambda path: path.stem)
def test_every_container_has_requests_and_a_limit_of_memory(values: Path) -> None:
    templates = pods(objects(values, settings=("agent.enabled=true",)))
    assert len(templates) >= 3
    for name, template in templates.items():
        for container in containers(template):
            resources = container["resources"]
            assert {"cpu", "memory"} <= set(resources["requests"]), (name, container["name"])
            assert "memory" in resources["limits"], (name, container["name"])


@pytest.mark.parametrize("values", [VALUES, *EXAMPLES], ids=lambda path: path.stem)
def test_one_registry_and_its_secrets_reach_every_image(values: Path) -> None:
    secrets = ("global.imageRegistry=registry.example/mirror", "global.imagePullSecrets={pull}", "agent.enabled=true")
    templates = pods(objects(values, settings=secrets))
    images = [container["image"] for template in templates.values() for container in containers(template)]
    assert {image.rpartition("/")[0] for image in images} == {"registry.example/mirror/polyreme"}
    assert all(template["spec"]["imagePullSecrets"] == [{"name": "pull"}] for template in templates.values())
    arguments = templates["polyreme-operator"]["spec"]["containers"][0]["args"]
    assert any(argument.startswith("--image=registry.example/mirror/polyreme/trainer:") for argument in arguments)
    assert "--worker-pull-secret=pull" in arguments


def test_every_image_of_an_installation_is_in_the_charts_list() -> None:
    annotations = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))["annotations"]
    listed = {each["name"]: each["image"] for each in yaml.safe_load(annotations["artifacthub.io/images"])}
    found = set()
    for settings in (EVERYTHING, ("devices.perNode=1",)):
        for template in pods(objects(settings=settings)).values():
            found |= {container["image"] for container in containers(template)}
            words = [word for container in containers(template) for word in container.get("args", ())]
            found |= {word.partition("=")[2] for word in words if word.startswith("--image=")}
    assert found == set(listed.values())


def test_a_proxy_reaches_every_http_client_and_is_not_asked_for_the_cluster() -> None:
    templates = pods(objects(Path(VALUES).with_name("openshift.yaml"), settings=("agent.enabled=true",)))
    assert len(templates) == 4
    for container in (each for template in templates.values() for each in containers(template)):
        env = {entry["name"]: entry.get("value") for entry in container["env"]}
        assert (env["HTTP_PROXY"], env["HTTPS_PROXY"]) == ("http://proxy.example:3128", "http://proxy.example:3129")
        direct = env["NO_PROXY"].split(",")
        assert {".svc", ".cluster.local", "localhost", "127.0.0.1", "::1", "$(KUBERNETES_SERVICE_HOST)"} <= set(direct)
        assert {".corp.example", "172.30.0.0/16"} <= set(direct)
        if "polyreme_operator" in container["command"]:
            for name in ("HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY"):
                assert f"--environment={name}={env[name]}" in container["args"]


@pytest.mark.parametrize(
    "url",
    [
        "postgresql+psycopg2://db.example/polyreme",
        "postgresql+psycopg2://db.example:5433/polyreme?sslmode=verify-full",
        "postgresql+psycopg2://me@db.example:5433/polyreme",
        "postgresql+psycopg2://[2001:db8::5]:5433/polyreme",
        "postgresql+psycopg2://[2001:db8::5]/polyreme",
        "postgresql+psycopg2:///polyreme?host=db.example&port=5433",
        "postgresql+psycopg2:///polyreme?port=5433&host=db.example",
        "postgresql+psycopg2:///polyreme?host=db.example:5433",
        "postgresql+psycopg2:///polyreme?host=db.example%3A5433&sslmode=require",
        "postgresql+psycopg2:///polyreme?host=a.example:5433&host=b.example",
        "postgresql+psycopg2:///polyreme?host=a.example:5433&host=b.example:5434",
        "postgresql+psycopg2:///polyreme?host=a.example,b.example&port=5433,5434",
        "postgresql+psycopg2:///polyreme?host=a.example%2Cb.example&port=5433%2C5434",
        "postgresql+psycopg2:///polyreme?host=a.example,b.example",
        "postgresql+psycopg2:///polyreme?host=2001:db8::5",
        "postgresql+psycopg2:///polyreme?host=2001:db8::5&port=5433",
        "postgresql+psycopg2://ignored.example:5999/polyreme?host=db.example",
        "postgresql+psycopg2://db.example:5999/polyreme?port=5433",
        "postgresql+psycopg2://db.example:5433/polyreme?application_name=host=x:1",
    ],
)
def test_egress_is_open_to_the_ports_that_the_driver_of_the_database_calls(url: str) -> None:
    """As SQLAlchemy and libpq read the URL."""
    assert open_ports(url) == ports_of_driver(url)


def test_egress_is_open_to_the_ports_of_hosts_in_one_list() -> None:
    """SQLAlchemy leaves such a list to libpq; ours splits it (registry/engine.py)."""
    assert open_ports("postgresql+psycopg2:///polyreme?host=a.example:5433,b.example") == {5433, 5432}


def ports_of_driver(url: str) -> set[int]:
    _, arguments = PGDialect_psycopg2().create_connect_args(make_url(url))
    return {int(port or 5432) for port in str(arguments.get("port", "")).split(",")}


def open_ports(url: str) -> set[int]:
    """Ports of the policy but those of topics and object store."""
    values = (*EVERYTHING[2:], "profile=production", f"database.url={url.replace(',', chr(92) + ',')}")
    (policy,) = (each for each in objects(settings=values) if each["metadata"]["name"] == "polyreme-stores")
    ((rule),) = policy["spec"]["egress"]
    assert all(each["protocol"] == "TCP" for each in rule["ports"])
    return {each["port"] for each in rule["ports"]} - {6650, 443}


@pytest.mark.parametrize("values", [VALUES, *EXAMPLES], ids=lambda path: path.stem)
def test_the_api_server_stores_what_is_rendered_and_completes_no_list(
    values: Path, kubeconfig: str, tmp_path: Path
) -> None:
    """Otherwise Argo CD and other appliers show a difference that no sync takes away."""
    manifests = [
        each
        for each in objects(values, settings=("agent.enabled=true",), crds=values == VALUES)
        if each["kind"] not in (*NOT_SERVED, "Namespace")
    ]
    namespaces = {each["metadata"].get("namespace", NAMESPACE) for each in manifests}
    for name in namespaces:
        (tmp_path / "namespace.json").write_text(
            json.dumps({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name}})
        )
        kubectl(kubeconfig, "apply", "-f", str(tmp_path / "namespace.json"))
    path = tmp_path / "all.json"
    path.write_text(json.dumps({"apiVersion": "v1", "kind": "List", "items": manifests}))
    options = ("--server-side", "--dry-run=server", "--field-manager=argocd-controller", "--force-conflicts")
    answer = json.loads(kubectl(kubeconfig, "apply", *options, "-o", "json", "-f", str(path)))
    assert len(answer["items"]) == len(manifests)
    differences = [
        f"{given['kind']} {given['metadata']['name']}: {path}"
        for given, stored in zip(manifests, answer["items"], strict=True)
        for path in changed(given, stored)
    ]
    assert differences == []


def changed(given: Any, stored: Any, path: str = "", key: str = "") -> Iterator[str]:
    """Places where an object is not stored as it was given; fields that are added to maps are left out."""
    if isinstance(given, dict) and isinstance(stored, dict):
        for name, value in given.items():
            if name not in stored:
                yield f"{path}.{name} is gone"
            else:
                yield from changed(value, stored[name], f"{path}.{name}", name)
    elif isinstance(given, list) and isinstance(stored, list) and len(given) == len(stored) and key in KEYED:
        for at, (one, other) in enumerate(zip(given, stored, strict=True)):
            yield from changed(one, other, f"{path}[{at}]")
    elif given != stored:
        yield f"{path}: {given} became {stored}"


def test_a_changed_value_and_a_completed_list_are_found() -> None:
    assert list(changed({"a": {"b": "0.5"}}, {"a": {"b": "500m"}, "c": 1})) == [".a.b: 0.5 became 500m"]
    assert list(changed({"rules": [{"port": 1}]}, {"rules": [{"port": 1, "protocol": "TCP"}]}))
    assert list(changed({"ports": [{"port": 1}]}, {"ports": [{"port": 1, "protocol": "TCP"}]})) == []
    assert list(changed({"a": 1}, {})) == [".a is gone"]
