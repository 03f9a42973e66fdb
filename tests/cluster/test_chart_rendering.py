"""What Helm makes of the chart: objects that the API server's schemas take, one sentence for each wrong value."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.cluster.kube import ROOT, kubectl
from tools.charts import schemas
from tools.charts.render import CHART, EXAMPLES, VALUES, HelmError, helm, outputs, rendered
from tools.cluster.binaries import client_path

PRODUCTION = (
    "profile=production",
    "database.url=postgresql+psycopg2://db.example/polyreme",
    "objectStore.url=s3://bucket",
    "topics.url=pulsar://broker.example:6650/a/b",
)
PASSWORD = "hunter2"
PRIVATE_KEY = f"-----BEGIN CERTIFICATE----- -----END CERTIFICATE----- -----BEGIN PRIVATE KEY-----{PASSWORD}"
NO_CRD = "ServiceMonitor,PrometheusRule"
"""Kinds of the Prometheus operator, which the cluster lacks; promtool checks the rules."""
CLIENTS_S = 60.0
TOKEN = "/var/run/secrets/kubernetes.io/serviceaccount"


@pytest.fixture(scope="module")
def schema_location(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Where kubeconform finds the schemas of the cluster under test."""
    folder = tmp_path_factory.mktemp("schemas")
    document = json.loads(kubectl(kubeconfig, "get", "--raw", "/openapi/v2"))
    assert schemas.write(document, folder) > 100
    return f"{folder}/{schemas.LOCATION}"


def conform(location: str, text: str, *options: str) -> subprocess.CompletedProcess[str]:
    command = [str(client_path("kubeconform", os.environ)), "-strict", "-output", "json", "-schema-location", location]
    return subprocess.run(
        [*command, *options], input=text, capture_output=True, text=True, check=False, timeout=CLIENTS_S
    )


def test_manifests_and_golden_files_are_what_the_chart_renders() -> None:
    for path, text in outputs().items():
        assert (ROOT / path).read_text(encoding="utf-8") == text, f"{path} is stale; run make manifests"


def test_eight_files_of_values_are_examples() -> None:
    assert len(EXAMPLES) == 8


@pytest.mark.parametrize("values", [VALUES, *EXAMPLES], ids=lambda path: path.stem)
def test_every_object_is_valid_by_the_api_servers_own_schemas(values: Path, schema_location: str) -> None:
    text = rendered(values, settings=["crds.install=true"])
    done = conform(schema_location, text, "-skip", NO_CRD, "-summary")
    assert done.returncode == 0, done.stdout
    summary = json.loads(done.stdout)["summary"]
    assert (summary["invalid"], summary["errors"]) == (0, 0)
    assert summary["valid"] >= 20


@pytest.mark.parametrize(
    ("planted", "said"),
    [
        ("spec: {replicas: many}", "got string, want null or integer|got string, want integer"),
        ("spec: {replica: 1}", "additional properties 'replica' not allowed"),
    ],
)
def test_an_invalid_object_is_found(planted: str, said: str, schema_location: str) -> None:
    done = conform(schema_location, f"apiVersion: apps/v1\nkind: Deployment\nmetadata: {{name: x}}\n{planted}\n")
    assert done.returncode == 1
    assert re.search(said, done.stdout), done.stdout


@pytest.mark.parametrize("values", EXAMPLES, ids=lambda path: path.stem)
def test_helm_lint_finds_nothing(values: Path) -> None:
    assert "1 chart(s) linted, 0 chart(s) failed" in helm("lint", "--strict", CHART, "--values", values)


def test_promtool_takes_the_rules_and_their_tests_pass() -> None:
    promtool = client_path("promtool", os.environ)
    for command in (["check", "rules", "files/rules.yaml"], ["test", "rules", "rules-test.yaml"]):
        done = subprocess.run(
            [promtool, *command], cwd=CHART, capture_output=True, text=True, check=False, timeout=CLIENTS_S
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_runbook_links_begin_as_the_values_say() -> None:
    text = rendered(CHART / "ci/monitoring.yaml", settings=["crds.install=false"])
    (rules,) = (one for one in yaml.safe_load_all(text) if one["kind"] == "PrometheusRule")
    links = [rule["annotations"]["runbook_url"] for group in rules["spec"]["groups"] for rule in group["rules"]]
    assert links
    assert all(link.startswith("https://wiki.example/polyreme/alerts#polyreme") for link in links)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        (["replicas=2"], "at '': additional properties 'replicas' not allowed"),
        (["operator.replica=2"], "at '/operator': additional properties 'replica' not allowed"),
        (["datahub.workers.tpu.maxReplicas=2"], "additional properties 'tpu' not allowed"),
        (["profile=staging"], "at '/profile': value must be one of 'development', 'production'"),
        (["devices.perNode=many"], "at '/devices/perNode': value must be 'auto'"),
        (["operator.args={data-gate}"], "at '/operator/args/0': 'data-gate' does not match pattern '^-'"),
        (["objectStore.url=gs://bucket"], "at '/objectStore/url': 'gs://bucket' does not match pattern"),
        (["profile=production"], "database.url is empty: the production profile needs it, for example postgresql"),
        ([*PRODUCTION, "objectStore.url="], "objectStore.url is empty: the production profile needs it"),
        (
            [*PRODUCTION, "topics.url="],
            "topics.url is empty: the datahub's workers share work by topics; name a broker",
        ),
        ([*PRODUCTION, "devices.perNode=2"], "devices.perNode is 2: nodes of the production profile offer their own"),
        (["topics.url=pulsar://broker.example/a/b"], "topics.url is set, but the development profile brings its own"),
        (["datahub.workers.cpu.maxReplicas=0"], "at '/datahub/workers/cpu/maxReplicas': minimum: got 0, want 1"),
        ([f"database.url=postgresql://me:{PASSWORD}@db.example/x"], "database.url holds a password"),
        ([f"database.url=postgresql://me@db.example/x?password={PASSWORD}"], "database.url holds a password"),
        ([f"topics.url=pulsar://token:{PASSWORD}@broker.example:6650"], "topics.url holds a password"),
        ([f"objectStore.endpoint=https://key:{PASSWORD}@s3.example"], "objectStore.endpoint holds a password"),
        ([f"proxy.httpsProxy=http://me:{PASSWORD}@proxy.example:3128"], "proxy.httpsProxy holds a password"),
        (
            ["proxy.httpsProxy=proxy.example:3128"],
            "at '/proxy/httpsProxy': 'proxy.example:3128' does not match pattern",
        ),
        (["global.imageRegistri=x"], "at '/global': additional properties 'imageRegistri' not allowed"),
        (["caBundle.pem=/etc/ssl/ca.crt"], "at '/caBundle/pem': '/etc/ssl/ca.crt' does not match pattern"),
        ([f"caBundle.pem={PRIVATE_KEY}"], "caBundle.pem holds a private key, which every worker could read"),
        (["caBundle.existingSecret=a", "caBundle.existingConfigMap=b"], "caBundle.existingSecret: set one of them"),
        (["image.registry=ab", "global.imageRegistry=bc"], "leave out image.registry, which is deprecated"),
        (
            [*PRODUCTION, "topics.url=pulsar://[fd00::1]:6650"],
            "topics.url names an IPv6 address, which Pulsar's client",
        ),
        (["console.enabled=true"], "console.url is empty: the console answers under one address alone; name it"),
        (
            ["console.url=http://polyreme.example.com"],
            "at '/console/url': 'http://polyreme.example.com' does not match",
        ),
        (["services.ipFamilies={IPv5}"], "at '/services/ipFamilies/0': value must be one of 'IPv4', 'IPv6'"),
    ],
    ids=lambda value: value if isinstance(value, str) else value[-1].partition("=")[0],
)
def test_a_wrong_value_is_refused_with_its_name(settings: list[str], said: str) -> None:
    with pytest.raises(HelmError) as caught:
        rendered(settings=settings)
    assert said in str(caught.value)
    assert PASSWORD not in str(caught.value)


def test_an_old_kubernetes_is_refused() -> None:
    with pytest.raises(HelmError, match=r"chart requires kubeVersion: >=1\.29\.0-0 which is incompatible with .*1\.28"):
        helm("template", "x", CHART, "--kube-version", "1.28.3")


@pytest.mark.parametrize("values", [None, VALUES, *EXAMPLES], ids=lambda path: path.stem if path else "no values")
def test_two_renderings_without_a_cluster_are_the_same(values: Path | None) -> None:
    """Or Argo CD would always find a difference. Helm makes credentials only where it can find them again."""
    given = [] if values is None else [values]
    first = rendered(*given)
    assert first == rendered(*given)
    assert "kind: Secret\n" not in first


def test_values_of_an_earlier_chart_are_refused_with_the_option_that_mends_them() -> None:
    with pytest.raises(HelmError, match="--reuse-values takes with all their defaults: use --reset-then-reuse-values"):
        rendered(settings=["caBundle=null"])


def test_only_containers_that_call_the_api_server_have_a_token() -> None:
    """The S3 server and the workers face data of strangers."""
    holders = set()
    for values in EXAMPLES:
        for manifest in yaml.safe_load_all(rendered(values, settings=["crds.install=false"])):
            if manifest["kind"] == "Deployment":
                pod = manifest["spec"]["template"]["spec"]
                containers = [*pod.get("initContainers", ()), *pod["containers"]]
                mounted = pod.get("automountServiceAccountToken", True)
                holders |= {
                    c["name"] for c in containers if mounted or TOKEN in {m["mountPath"] for m in c["volumeMounts"]}
                }
    assert holders == {"operator", "datahub", "device-advertiser"}


def test_no_template_makes_a_custom_resource_or_a_pod_that_is_not_restricted() -> None:
    for values in EXAMPLES:
        for manifest in yaml.safe_load_all(rendered(values)):
            assert not manifest["apiVersion"].startswith("polyreme.dev/"), manifest["kind"]
            template = manifest["spec"]["template"]["spec"] if manifest["kind"] == "Deployment" else None
            if template is None:
                continue
            assert template["securityContext"]["runAsNonRoot"]
            assert template["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
            for container in (*template.get("initContainers", ()), *template["containers"]):
                restricted = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
                assert restricted.items() <= container["securityContext"].items()
