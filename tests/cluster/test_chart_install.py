"""Install, upgrade, roll back and uninstall the chart on a real API server; no container runs."""

import asyncio
import base64
import json
import os
import re
import shlex
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import InvalidObjectError, ObjectRef
from polyreme_operator.device_advertiser import RESOURCE, offer
from tests.cluster.kube import ROOT, apply_crds, kubectl, until
from tests.cluster.operators import nodes
from tools.charts.render import CHART, NAMESPACE, RELEASE, HelmError, helm, rendered
from tools.cluster.binaries import client_path

CLASS = "polyreme-test"
ROUNDS_MAX = 20
CRDS = ("clustertopologies", "nodefaultpolicies", "nodeincidents", "trainingjobs", "trainingqueues")
PAGE = ROOT / "docs/how-to/install.md"
README = ROOT / "README.md"
PAGE_S_MAX = 180.0
SECRETS = ("polyreme-database", "polyreme-topics", "polyreme-object-store")
OURS = "app.kubernetes.io/part-of=polyreme"
NAMESPACED = "deployments,pods,services,secrets,configmaps,roles,rolebindings,serviceaccounts,networkpolicies,pdb"
PRODUCTION = (
    "profile=production",
    "database.url=postgresql+psycopg2://db.example/polyreme",
    "database.existingSecret=database",
    "objectStore.url=s3://bucket",
    "objectStore.existingSecret=objects",
    "topics.url=pulsar://broker.example:6650/a/b",
)


class Installation:
    """A cluster with polyreme's CRDs alone, and Helm."""

    def __init__(self, kubeconfig: str) -> None:
        self.kubeconfig = kubeconfig

    def helm(self, *arguments: str) -> str:
        return helm(*arguments, "--namespace", NAMESPACE, kubeconfig=self.kubeconfig)

    def install(self, *settings: str, options: tuple[str, ...] = ()) -> str:
        return self.helm("install", RELEASE, str(CHART), *_sets(settings), *options)

    def upgrade(self, *settings: str, options: tuple[str, ...] = ()) -> str:
        return self.helm("upgrade", RELEASE, str(CHART), *_sets(settings), *options)

    def kubectl(self, *arguments: str) -> str:
        return kubectl(self.kubeconfig, *arguments)

    def get(self, kind: str, name: str, namespace: str = NAMESPACE) -> Any:
        return json.loads(self.kubectl("get", kind, name, "-n", namespace, "-o", "json"))

    def ours(self, kinds: str) -> list[str]:
        """Names of what carries the chart's label."""
        return self.kubectl("get", kinds, "-n", NAMESPACE, "-l", OURS, "-o", "name").split()

    def credentials(self, name: str, namespace: str) -> dict[str, str]:
        data = self.get("secret", name, namespace)["data"]
        return {key: base64.b64decode(value).decode() for key, value in data.items()}

    def refused(self, act: Any, *settings: str, options: tuple[str, ...] = ()) -> str:
        """What Helm says of an act that fails; nothing of it is in the cluster."""
        with pytest.raises(HelmError) as caught:
            act(*settings, options=options)
        return str(caught.value)

    def reset(self) -> None:
        """Take every trace away, whatever the last test left, but CRDs that belong to no release."""
        self.helm("uninstall", RELEASE, "--ignore-not-found", "--wait")
        self.kubectl("delete", "pvc", "--all", "-n", NAMESPACE, "--wait=false")
        self.kubectl("delete", "clusterroles,clusterrolebindings", "-l", OURS)
        self.kubectl("delete", NAMESPACED, "-n", NAMESPACE, "-l", OURS)
        if any(self.is_touched(plural) for plural in CRDS):
            apply_crds(self.kubeconfig)

    def is_touched(self, plural: str) -> bool:
        """Tell whether a CRD belongs to a release, or has another version or digest than ours."""
        found = annotations(self, plural)
        own = yaml.safe_load((ROOT / f"manifests/crds/polyreme.dev_{plural}.yaml").read_text())["metadata"][
            "annotations"
        ]
        return "meta.helm.sh/release-name" in found or any(found.get(key) != value for key, value in own.items())


def _sets(settings: tuple[str, ...]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


@pytest.fixture(scope="module")
def namespaced(kubeconfig: str) -> Iterator[str]:
    """The release's namespace, at the restricted level."""
    for namespace in (NAMESPACE, "research"):
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        _apply(kubeconfig, {"kind": "Namespace", "metadata": {"name": namespace, "labels": labels}})
    yield kubeconfig
    Installation(kubeconfig).reset()
    kubectl(kubeconfig, "delete", "namespace", "research", "--wait=false")


@pytest.fixture
def cluster(namespaced: str) -> Installation:
    installation = Installation(namespaced)
    installation.reset()
    return installation


@contextmanager
def storage(cluster: Installation, *, default: bool = True) -> Iterator[None]:
    """A StorageClass without a provisioner."""
    note = {"storageclass.kubernetes.io/is-default-class": str(default).lower()}
    metadata = {"name": CLASS, "annotations": note}
    kind = {"apiVersion": "storage.k8s.io/v1", "kind": "StorageClass", "provisioner": "none.example/none"}
    _apply(cluster.kubeconfig, {**kind, "metadata": metadata})
    try:
        yield
    finally:
        cluster.kubectl("delete", "storageclass", CLASS)


def _apply(kubeconfig: str, manifest: dict[str, Any]) -> None:
    text = json.dumps({"apiVersion": "v1", **manifest})
    path = Path(kubeconfig).parent / "applied.json"
    path.write_text(text)
    kubectl(kubeconfig, "apply", "-f", str(path))


def test_development_installs_upgrades_rolls_back_and_leaves_only_what_the_docs_say(cluster: Installation) -> None:
    adopt = "crds.adopt=true"
    with storage(cluster):
        said = cluster.install("jobs.namespaces={default,research}", adopt, options=("--take-ownership",))
        assert "kubectl apply -f manifests/samples/quickstart.yaml" in said
        first = cluster.credentials("polyreme-s3", NAMESPACE)
        assert len(first["AWS_SECRET_ACCESS_KEY"]) == 40
        for namespace in ("default", "research"):
            assert cluster.credentials("polyreme-object-store", namespace) == first
        # The namespace refuses pods that are not restricted.
        until(lambda: len(cluster.ours("pods")) == 4, "two operators, the datahub and the device advertiser have pods")
        claims = cluster.get("pvc", "polyreme-datahub")["metadata"]["uid"]

        cluster.upgrade("jobs.namespaces={default}", adopt, "operator.logLevel=debug")
        assert cluster.credentials("polyreme-s3", NAMESPACE) == first
        assert cluster.credentials("polyreme-object-store", "default") == first
        assert "polyreme-object-store" not in cluster.kubectl("get", "secrets", "-n", "research", "-o", "name")
        arguments = cluster.get("deployment", "polyreme-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--log-level=debug" in arguments

        cluster.helm("rollback", RELEASE, "1")
        arguments = cluster.get("deployment", "polyreme-operator")["spec"]["template"]["spec"]["containers"][0]["args"]
        assert "--log-level=info" in arguments
        assert cluster.credentials("polyreme-object-store", "research") == first

        said = cluster.helm("uninstall", RELEASE, "--wait")
        assert "[PersistentVolumeClaim] polyreme-datahub" in said
        assert cluster.get("pvc", "polyreme-datahub")["metadata"]["uid"] == claims
        assert cluster.ours(NAMESPACED) == []
        assert cluster.ours("clusterroles,clusterrolebindings") == []
        for plural in CRDS:
            assert annotations(cluster, plural)["meta.helm.sh/release-name"] == RELEASE
            assert f"[CustomResourceDefinition] {plural}.polyreme.dev" in said

        cluster.install()
        assert cluster.get("pvc", "polyreme-datahub")["metadata"]["uid"] == claims


def test_a_cluster_that_can_not_hold_the_volume_is_refused_before_anything_is_made(cluster: Installation) -> None:
    if json.loads(cluster.kubectl("get", "storageclass", "-o", "json"))["items"]:
        pytest.skip("the cluster that KUBECONFIG names has a StorageClass")
    said = cluster.refused(cluster.install)
    assert "the cluster has no default StorageClass for the datahub's volume" in said
    assert "it has no StorageClass" in said
    with storage(cluster, default=False):
        assert f"it has {CLASS}" in cluster.refused(cluster.install)
        said = cluster.refused(cluster.install, "bundledS3.storage.className=fast")
        assert f"the cluster has no such StorageClass; it has {CLASS}" in said
        said = cluster.refused(cluster.install, "bundledS3.storage.existingClaim=mine")
        assert f"namespace {NAMESPACE} has no PersistentVolumeClaim mine" in said
        said = cluster.refused(cluster.install, f"bundledS3.storage.className={CLASS}", "jobs.namespaces={nowhere}")
        assert "there is no namespace nowhere; create it first (kubectl create namespace nowhere)" in said
        assert cluster.ours(NAMESPACED) == []
        cluster.install(f"bundledS3.storage.className={CLASS}")


def test_an_upgrade_in_production_keeps_the_size_of_the_worker_pool(cluster: Installation) -> None:
    said = cluster.install(*PRODUCTION, "image.registry=registry.example", "operator.env[0].name=A")
    assert "Deprecated: image.registry is now global.imageRegistry." in said
    assert "Deprecated: operator.env is now operator.extraEnv." in said
    assert said.count("Deprecated") == 2
    # Two operators, two controllers and one worker, in a namespace of the restricted level.
    until(lambda: len(cluster.ours("pods")) == 5, "every Deployment has its pods")
    cluster.kubectl("scale", "deployment/polyreme-datahub-workers", "-n", NAMESPACE, "--replicas=3")
    cluster.upgrade(*PRODUCTION, "datahub.workers.threads=4")
    workers = cluster.get("deployment", "polyreme-datahub-workers")["spec"]
    assert workers["replicas"] == 3
    assert "--workers=4" in workers["template"]["spec"]["containers"][0]["args"]


def test_crds_that_exist_already_are_left_adopted_or_refused(cluster: Installation) -> None:
    cluster.install(*PRODUCTION)
    assert "meta.helm.sh/release-name" not in annotations(cluster, "trainingjobs")
    changed = {"metadata": {"annotations": {"polyreme.dev/crd-digest": "0"}}}
    cluster.kubectl("patch", "crd", "trainingjobs.polyreme.dev", "--type=merge", "-p", json.dumps(changed))
    said = cluster.refused(cluster.upgrade, *PRODUCTION)
    assert "CRD trainingjobs.polyreme.dev exists with another content and is not part of this release" in said
    assert "--take-ownership --set crds.adopt=true" in said
    cluster.upgrade(*PRODUCTION, "crds.adopt=true", options=("--take-ownership",))
    assert annotations(cluster, "trainingjobs")["meta.helm.sh/release-name"] == RELEASE
    assert annotations(cluster, "trainingjobs")["polyreme.dev/crd-digest"] != "0"
    cluster.upgrade(*PRODUCTION)


def test_newer_crds_are_refused_at_install_and_at_upgrade(cluster: Installation) -> None:
    cluster.install(*PRODUCTION)
    newer = {"metadata": {"annotations": {"polyreme.dev/crd-version": "99.1.0"}}}
    cluster.kubectl("patch", "crd", "trainingqueues.polyreme.dev", "--type=merge", "-p", json.dumps(newer))
    said = cluster.refused(cluster.upgrade, *PRODUCTION)
    assert "CRD trainingqueues.polyreme.dev is of polyreme 99.1.0, newer than this chart" in said
    assert "install chart 99.1.0 or newer, or set crds.install=false" in said
    cluster.helm("uninstall", RELEASE)
    assert "99.1.0" in cluster.refused(cluster.install, *PRODUCTION)
    cluster.install(*PRODUCTION, "crds.install=false")


def annotations(cluster: Installation, plural: str) -> dict[str, str]:
    found: dict[str, str] = cluster.get("crd", f"{plural}.polyreme.dev")["metadata"]["annotations"]
    return found


def test_the_device_advertiser_may_offer_devices_and_nothing_else(cluster: Installation, tmp_path: Path) -> None:
    account = "polyreme-device-advertiser"

    async def story(path: Path) -> None:
        async with KubernetesCluster(from_kubeconfig(str(path))) as port:
            offered: list[str] = []
            # A node that others write to meanwhile is left for the next round.
            for _ in range(ROUNDS_MAX):
                offered += await offer(port, resource=RESOURCE, per_node=3)
                if "advertised-0" in offered:
                    break
            assert offered.count("advertised-0") == 1
            with pytest.raises(InvalidObjectError):
                await port.patch(ObjectRef(kind="Node", name="advertised-0"), {"metadata": {"labels": {"a": "b"}}})

    async def with_node(path: Path) -> None:
        async with (
            KubernetesCluster(from_kubeconfig(cluster.kubeconfig)) as port,
            nodes(port, "advertised", 1, devices=1),
        ):
            await story(path)
            found = (await port.get(ObjectRef(kind="Node", name="advertised-0")))["status"]
            assert (found["capacity"][RESOURCE], found["allocatable"][RESOURCE]) == ("3", "3")

    with storage(cluster):
        cluster.install()
        token = cluster.kubectl("create", "token", account, "--namespace", NAMESPACE).strip()
        content = yaml.safe_load(cluster.kubectl("config", "view", "--raw", "--minify", "--flatten"))
        content["users"][0]["user"] = {"token": token}
        path = tmp_path / "kubeconfig"
        path.write_text(yaml.safe_dump(content))
        asyncio.run(with_node(path))
        asked = cluster.kubectl("auth", "can-i", "--list", "--as", f"system:serviceaccount:{NAMESPACE}:{account}")
    rights = [line.split() for line in asked.splitlines() if line.startswith("nodes")]
    assert sorted((line[0], line[-1].strip("[]")) for line in rights) == [("nodes", "list"), ("nodes/status", "patch")]
    assert "secrets" not in asked


def test_manifests_without_helm_are_the_same_installation(cluster: Installation) -> None:
    cluster.kubectl("apply", "-f", str(ROOT / "manifests"))
    applied = set(cluster.ours("deployments"))
    cluster.reset()
    with storage(cluster):
        cluster.install()
        assert set(cluster.ours("deployments")) == applied


def test_the_pages_helm_commands_and_objects_are_taken(cluster: Installation, tmp_path: Path) -> None:
    """As they are written and in their order; production only as a dry run, since it would need other servers."""
    text = PAGE.read_text(encoding="utf-8")
    commands = [shlex.split(line) for line in re.findall(r"^    (helm .*)$", text, re.MULTILINE)]
    assert [words[1] for words in commands] == ["install", "install", *["upgrade"] * 4, "rollback", "uninstall"]
    assert "    " + shlex.join(commands[0]) in README.read_text(encoding="utf-8").splitlines()
    production, other, authority = tmp_path / "production.yaml", tmp_path / "other.yaml", tmp_path / "ca.crt"
    authority.write_text("-----BEGIN CERTIFICATE-----\nMIIB\n-----END CERTIFICATE-----\n")
    blocks = re.findall(r"```yaml\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 8
    (queue,) = (block for block in blocks if "kind: TrainingQueue" in block)
    (rules,) = (block for block in blocks if isinstance(yaml.safe_load(block), list))
    assert [set(rule) for rule in yaml.safe_load(rules)] == [{"level", "verbs", "resources"}]
    production.write_text(next(block for block in blocks if block.startswith("# production.yaml")))
    for block in blocks:
        other.write_text(block)
        if block in {queue, rules}:
            continue
        if "kind: NetworkPolicy" in block:
            cluster.kubectl("apply", "--dry-run=server", "-f", str(other))
        else:
            assert "kind: Deployment" in rendered(production, other)

    def run(words: list[str], *more: str) -> str:
        places = {"charts/polyreme": str(CHART), "production.yaml": str(production)}
        places["caBundle.pem=ca.crt"] = f"caBundle.pem={authority}"
        return helm(*(places.get(word, word) for word in words[1:]), *more, kubeconfig=cluster.kubeconfig)

    development, productive, registry, certificates, metrics, upgrade, *rest = commands
    run(productive, "--dry-run=server")
    with storage(cluster):
        run(development)
        other.write_text(queue)
        cluster.kubectl("apply", "--dry-run=server", "-f", str(other))
        run(registry)
        image = cluster.get("deployment", "polyreme-operator")["spec"]["template"]["spec"]
        assert image["containers"][0]["image"].startswith("registry.example/mirror/polyreme/operator:")
        assert image["imagePullSecrets"] == [{"name": "registry"}]
        run(certificates)
        assert cluster.get("configmap", "polyreme-ca-bundle")["data"]["ca.crt"].strip() == authority.read_text().strip()
        with pytest.raises(HelmError, match=r'no matches for kind "(ServiceMonitor|PrometheusRule)"'):
            run(metrics)
        for words in (upgrade, *rest):
            run(words)
    assert cluster.ours(NAMESPACED) == []


def test_production_on_one_machine_is_installed_as_its_page_says(cluster: Installation, tmp_path: Path) -> None:
    """All that it types but what starts servers, builds images and waits for pods: no pod runs on this API server."""
    text = (ROOT / "docs/how-to/production-on-one-machine.md").read_text(encoding="utf-8")
    lines = [line for block in re.findall(r"```bash\n(.*?)```", text, re.DOTALL) for line in block.splitlines()]
    left_out = ("make ", "export ", "eval ", "kubectl wait", "kubectl get", "kubectl polyreme", "polyreme ")
    typed = [line for line in lines if not line.startswith(left_out) and "rollout status" not in line]
    assert len(typed) >= 16
    folders = {str(client_path(name, os.environ).parent) for name in ("helm", "kubectl")}
    variables = {
        "POLYREME_DATABASE_URL": "postgresql+psycopg2://198.18.1.1:15432/polyreme",
        "POLYREME_TOPICS_URL": "pulsar://198.18.1.1:16650",
        "POLYREME_OBJECTS_URL": "s3://polyreme",
        "AWS_ENDPOINT_URL": "http://198.18.1.1:17070",
        "AWS_REGION": "us-east-1",
        **dict.fromkeys(("PGUSER", "PGPASSWORD", "POLYREME_TOPICS_TOKEN"), "x"),
        **dict.fromkeys(("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"), "x"),
        "KUBECONFIG": cluster.kubeconfig,
        "PATH": os.pathsep.join([*folders, os.environ["PATH"]]),
    }
    # The namespace is there already, and its Secrets may be there from an earlier run.
    script = "\n".join(line for line in typed if line != f"kubectl create namespace {NAMESPACE}")
    for namespace in (NAMESPACE, "default"):
        cluster.kubectl("delete", "secrets", "-n", namespace, "--ignore-not-found", *SECRETS)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", script],
        cwd=ROOT,
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=PAGE_S_MAX,
    )
    assert done.returncode == 0, done.stderr
    for said in ("STATUS: deployed", "trainingjob.polyreme.dev/quickstart created", 'release "polyreme" uninstalled'):
        assert said in done.stdout
    for namespace in (NAMESPACE, "default"):
        cluster.kubectl("delete", "secrets", "-n", namespace, "--ignore-not-found", *SECRETS)
