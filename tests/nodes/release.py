"""polyreme on the cluster under test, as a user installs it: images, the chart, a job."""

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyreme_launcher.agent import PROCESSES_FILE
from polyreme_operator.reconcile.worker_pods import POD_FOLDER
from tests.nodes import packages
from tests.nodes.cluster import PATIENCE_S, RESTRICTED, ROOT, Cluster, Manifest
from tools.cluster.binaries import program_path
from tools.cluster.servers import ServerError
from tools.images import base
from tools.images.build import PYTHON_IMAGES, BuildRequest, build
from tools.images.engine import find

CHART = ROOT / "charts/polyreme"
NAME = "polyreme"
SYSTEM = "polyreme-system"
JOBS = "default"
"""Namespace of the jobs."""
DEPLOYMENTS = ("polyreme-operator", "polyreme-datahub")
THIN = ("operator", "datahub", "trainer")
DEVICES = 2
"""Devices of a node: a gang of two workers with two devices each takes two nodes."""
HELM_S_MAX = 300
JOB_S_MAX = 600.0
_WARM = (
    "import torch, polyreme_trainer.train.loop, polyreme_datahub_service.main, polyreme_operator.service, pulsar, "
    "psycopg2"
)


def prepare(cluster: Cluster, *, whole: Sequence[str] = ()) -> None:
    """Give the nodes our images, and the namespaces of system and jobs the restricted level and the packages.

    Args:
        cluster: Where.
        whole: Images that are built with the packages of others; the rest are thin.
    """
    if cluster.folder is not None:
        assert set(THIN) <= set(PYTHON_IMAGES)
        folder = ROOT / "build/images/thin"
        request = BuildRequest(
            images=("s3", *whole), thin=[name for name in THIN if name not in whole], base=base.LOCAL
        )
        cluster.load(list(build(request, find(None), os.environ, folder=folder).values()))
        # Pods may not write bytecode beside the packages, and compiling torch takes each of them half a minute.
        subprocess.run([sys.executable, "-c", _WARM], check=True, env={**os.environ, "PYTHONDONTWRITEBYTECODE": ""})
    for namespace in (SYSTEM, JOBS):
        labels = {"name": namespace, "labels": RESTRICTED}
        cluster.kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": labels}])
        if cluster.folder is not None:
            cluster.kubectl.apply(packages.volume(namespace))


def values(cluster: Cluster, **more: Any) -> dict[str, Any]:
    """Values of the chart; where images are thin, each component mounts the packages."""
    found: dict[str, Any] = {"operator": {}, "datahub": {"controller": {}}, **more}
    if cluster.folder is not None:
        mounted = {"volumes": packages.VOLUMES, "volumeMounts": packages.MOUNTS}
        found["operator"] |= mounted
        found["datahub"]["controller"] |= mounted
        if "agent" in found:
            found["agent"]["volumes"] += [{"name": packages.CLAIM, "hostPath": {"path": packages.FOLDER}}]
            found["agent"]["volumeMounts"] += packages.MOUNTS
        if "workers" in found["datahub"]:
            found["datahub"]["workers"]["cpu"].update(mounted)
    return found


def production_values(cluster: Cluster, servers: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    """Values of the production profile on some servers."""
    cpu = {"maxReplicas": 2, "resources": {"requests": {"cpu": "100m", "memory": "256Mi"}}}
    return values(cluster, datahub={"controller": {}, "workers": {"cpu": cpu}}, **servers, **more)


class Release:
    """The release of the chart.

    Args:
        cluster: Where.
    """

    def __init__(self, cluster: Cluster) -> None:
        self._cluster = cluster

    def helm(self, *arguments: str, given: Mapping[str, Any] | None = None) -> str:
        """Run helm in the release's namespace, with values, and return what it prints."""
        command = [str(program_path("helm", os.environ)), "--kubeconfig", str(self._cluster.kubeconfig)]
        command += ["--namespace", SYSTEM, *arguments, *(["--values", "-"] if given is not None else [])]
        done = subprocess.run(
            command,
            input=None if given is None else json.dumps(given),
            capture_output=True,
            text=True,
            check=False,
            timeout=HELM_S_MAX,
        )
        assert done.returncode == 0, f"helm {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def install(self, given: Mapping[str, Any], *, chart: Path = CHART) -> None:
        """Install the chart and wait until everything is ready."""
        self.helm("upgrade", "--install", NAME, str(chart), given=given)
        self.wait()

    def wait(self) -> None:
        """Wait until every Deployment has rolled out."""
        names = self._cluster.kubectl("--namespace", SYSTEM, "get", "deployments", "-o", "name").split()
        for name in names:
            try:
                self._cluster.kubectl(
                    *("--namespace", SYSTEM, "rollout", "status", name, f"--timeout={PATIENCE_S:.0f}s"),
                    timeout_s=PATIENCE_S + 10,
                )
            except (ServerError, subprocess.TimeoutExpired) as error:
                raise AssertionError(f"{error}\n{self.said()}") from None

    def uninstall(self) -> None:
        """Uninstall it and wait until its pods are gone."""
        self.helm("uninstall", NAME, "--wait")

    def said(self) -> str:
        """Return the end of the log of every container, and the events: what a failed test shows."""
        lines = []
        for pod in self._cluster.get("--namespace", SYSTEM, "pods")["items"]:
            name = pod["metadata"]["name"]
            with contextlib.suppress(ServerError):
                words = ("--namespace", SYSTEM, "logs", name, "--all-containers", "--prefix", "--tail=15")
                lines.append(self._cluster.kubectl(*words))
        lines.append(self._cluster.kubectl("events", "--all-namespaces"))
        return "\n".join(lines)[-12000:]


def job(cluster: Cluster, path: Path, *, whole: bool = False) -> Manifest:
    """Return the job of a file as pods run it: where the trainer's image is thin, its workers mount the packages."""
    manifest: Manifest = yaml.safe_load(path.read_text())
    if cluster.folder is not None and not whole:
        container = {"name": "trainer", "volumeMounts": packages.MOUNTS}
        manifest["spec"]["workers"]["template"] = {"spec": {"volumes": packages.VOLUMES, "containers": [container]}}
    return manifest


class Job:
    """A job on the cluster.

    Args:
        cluster: Where.
        name: Its name.
    """

    def __init__(self, cluster: Cluster, name: str) -> None:
        self._cluster, self.name = cluster, name

    @property
    def status(self) -> dict[str, Any]:
        """Its status."""
        found: dict[str, Any] = self._cluster.get("--namespace", JOBS, "trainingjob", self.name).get("status") or {}
        return found

    @property
    def pods(self) -> list[Manifest]:
        """Its pods, by index."""
        found = self._cluster.get("--namespace", JOBS, "pods", "-l", f"polyreme.dev/job={self.name}")["items"]
        return sorted(found, key=lambda pod: int(pod["metadata"]["labels"]["polyreme.dev/index"]))

    def until(self, holds: Any, what: str, *, patience_s: float = JOB_S_MAX) -> dict[str, Any]:
        """Wait until something holds of its status; it must not fail."""

        def look() -> dict[str, Any] | None:
            status = self.status
            conditions = {each["type"]: each for each in status.get("conditions") or ()}
            assert conditions.get("Failed", {}).get("status") != "True", json.dumps(conditions["Failed"])
            return status if status and holds(status) else None

        try:
            found: dict[str, Any] = self._cluster.until(look, f"{self.name}: {what}", patience_s=patience_s)
        except AssertionError as error:
            shown = json.dumps(self.status, indent=1)[:4000]
            raise AssertionError(f"{error}\n{shown}\n{Release(self._cluster).said()}") from None
        return found

    def until_succeeded(self, *, patience_s: float = JOB_S_MAX) -> dict[str, Any]:
        """Wait until it has succeeded."""
        return self.until(lambda status: is_true(status, "Succeeded"), "succeeded", patience_s=patience_s)


def is_true(status: Mapping[str, Any], kind: str) -> bool:
    """Whether a condition holds."""
    return any(each["type"] == kind and each["status"] == "True" for each in status.get("conditions") or ())


@contextlib.contextmanager
def created(cluster: Cluster, manifest: Manifest) -> Iterator[Job]:
    """Create a job, and delete it when the block ends."""
    name = manifest["metadata"]["name"]
    cluster.kubectl.apply([{**manifest, "metadata": {**manifest["metadata"], "namespace": JOBS}}])
    try:
        yield Job(cluster, name)
    finally:
        cluster.kubectl("--namespace", JOBS, "delete", "trainingjob", name, "--wait=false", "--ignore-not-found")


def inside(cluster: Cluster, pod: Manifest, program: str) -> str:
    """Run Python in a job's pod."""
    words = ("--namespace", JOBS, "exec", pod["metadata"]["name"], "--", "python", "-c", program)
    return cluster.kubectl(*words)


def kill_rank(cluster: Cluster, pod: Manifest, rank: int) -> None:
    """Kill a rank inside its container."""
    path = f"{POD_FOLDER}/{PROCESSES_FILE}"
    inside(cluster, pod, f"import json, os; os.kill(json.load(open('{path}'))['ranks']['{rank}'], 9)")


def state(cluster: Cluster, training: Job) -> dict[str, Any]:
    """What of a job an upgrade may not change."""
    pods = training.pods
    ranks = f"print(open('{POD_FOLDER}/{PROCESSES_FILE}').read())"
    return {
        "pods": [pod["metadata"]["uid"] for pod in pods],
        "attempt": training.status["attempt"]["number"],
        "ranks": [json.loads(inside(cluster, pod, ranks))["ranks"] for pod in pods],
    }
