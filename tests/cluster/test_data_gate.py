"""On a real API server a job waits for its data with a condition, polyreme-datahub prepares it, then ranks train."""

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api import labels
from polyreme_api.fields import Condition
from polyreme_api.job import TrainingJobStatus, parse_job
from polyreme_cluster.port import ClusterPort, Manifest, ObjectRef
from polyreme_datahub.hub import register
from polyreme_operator.settings import Settings
from tests.cluster import laptop
from tests.cluster.kube import ROOT, api_client, kubectl, new_namespace
from tests.cluster.test_training_on_kubernetes import PATIENCE_S, Machine, finished
from tests.e2e.small_jobs import record, write_jsonl

SYSTEM = "polyreme-system"
BAD = "bad/pages"
RIGHTS = {"ServiceAccount", "ClusterRole", "ClusterRoleBinding", "Role", "RoleBinding"}


def datahub_kubeconfig(kubeconfig: str, folder: Path) -> Path:
    """Give the controller its rights, as the manifest does, and return a kubeconfig of its service account."""
    documents = list(yaml.safe_load_all((ROOT / "manifests/datahub.yaml").read_text()))
    rights = folder / "datahub-rights.yaml"
    rights.write_text(yaml.safe_dump_all([each for each in documents if each["kind"] in RIGHTS]))
    kubectl(kubeconfig, "apply", "-f", str(ROOT / "manifests/namespace.yaml"), "-f", str(rights))
    token = kubectl(kubeconfig, "create", "token", "polyreme-datahub", "--namespace", SYSTEM).strip()
    content: dict[str, Any] = yaml.safe_load(kubectl(kubeconfig, "config", "view", "--raw", "--minify", "--flatten"))
    content["users"][0]["user"] = {"token": token}
    path = folder / "datahub.kubeconfig"
    path.write_text(yaml.safe_dump(content))
    path.chmod(0o600)
    return path


def condition(status: TrainingJobStatus, kind: str) -> Condition:
    empty = Condition(type=kind, status="Unknown", reason="None")
    return status.condition(kind) or empty


async def until(
    port: ClusterPort, ref: ObjectRef, holds: Callable[[TrainingJobStatus], bool], what: str
) -> TrainingJobStatus:
    """Wait for a status; no job may hold devices before its data is ready."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(PATIENCE_S):
            while True:
                status = parse_job(await port.get(ref)).status
                ready = condition(status, "DataReady").status == "True"
                assert ready or status.attempt is None, status
                if holds(status):
                    return status
                await asyncio.sleep(0.1)
    raise AssertionError(f"never: {what}: {(await port.get(ref)).get('status')}")


@pytest.mark.slow
def test_a_job_waits_for_its_data_then_trains_and_wrong_data_is_refused_with_its_error(
    kubeconfig: str, tmp_path: Path
) -> None:
    async def story(machine: Machine) -> None:
        lines = tmp_path / "bad.jsonl"
        (tmp_path / "torn.png").write_bytes(b"no picture")
        write_jsonl(lines, [record(f"r{at}", ["torn.png"], "red") for at in range(2)])
        machine.home.prepare_data()
        register(machine.home.registry_url, machine.home.objects_url, BAD, str(lines))
        credentials = await asyncio.to_thread(datahub_kubeconfig, kubeconfig, tmp_path)
        command = [sys.executable, "-m", "polyreme_datahub_service.main", "--namespace", SYSTEM]
        command += ["--jobs-namespace", machine.namespace, "--home", str(machine.home.path), "--log-format", "text"]
        environment = {**os.environ, "KUBECONFIG": str(credentials)}
        async with machine.serving(Settings(data_gate=True)) as port:
            good, bad = await create(port, machine, "good"), await create(port, machine, "bad", dataset=BAD)
            waits = await until(port, good, lambda status: bool(condition(status, "Queued").message), "it says why")
            assert condition(waits, "Queued").reason == "WaitingForData"
            assert condition(waits, "DataReady").reason == "NotReported"
            with laptop.process("datahub", command, environment, tmp_path):
                await until(port, good, lambda status: status.is_true("DataReady"), "its data is ready")
                job = await finished(port, good, tmp_path)
                assert job.status.is_true("Succeeded"), job.status
                refused = await until(
                    port, bad, lambda status: condition(status, "DataReady").reason == "DataRefused", "refused"
                )
                assert "has no good record: 2 records are dead letters" in condition(refused, "DataReady").message
                assert condition(refused, "Queued").reason == "DataRefused"
            log = (tmp_path / "datahub.log").read_text()
            assert " 403" not in log, log[-4000:]

    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        asyncio.run(story(Machine(tmp_path, kubeconfig, api, namespace)))


async def create(port: ClusterPort, machine: Machine, name: str, *, dataset: str = "") -> ObjectRef:
    manifest: Manifest = machine.manifest(name)
    if dataset:
        manifest["spec"]["data"]["sources"] = [{"name": "one", "dataset": dataset}]
    await port.create(manifest)
    return ObjectRef(kind=labels.KIND_JOB, namespace=machine.namespace, name=name)
