"""What is done to a job on a real API server does not show in its losses: they equal those of a job left in peace."""

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme.run_files.records import read_records
from polyreme_api import labels
from polyreme_api.history import steps_key
from polyreme_api.progress import StepRecord
from polyreme_launcher.agent import PROCESSES_FILE
from tests.cluster.kube import api_client, new_namespace
from tests.cluster.laptop import laptop
from tests.processes import is_asked_to_end, is_stopped, wake

STEPS = 60
PATIENCE_S = 300.0
RESOURCE = labels.RESOURCE_DEVICE


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_killed_rank_and_a_preemption_leave_every_loss_as_it_was(kubeconfig: str, tmp_path: Path) -> None:
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        nodes = (f"{namespace}-a", f"{namespace}-b")
        with laptop(
            kubeconfig, tmp_path, nodes=nodes, devices=1, namespace=namespace, resource=RESOURCE
        ) as environment:
            kubectl = Kubectl(environment)
            kubectl.apply(queue(namespace))
            kubectl.apply(job("disturbed", namespace))
            until_trained(tmp_path, namespace, "disturbed", attempt=1, steps=12)
            kill_rank(tmp_path, "disturbed", index=1)
            until_trained(tmp_path, namespace, "disturbed", attempt=2, steps=12)
            # Held still, or a fast machine trains the last steps before the queue has decided.
            with held_still(rank_of(tmp_path, "disturbed", index=1)):
                kubectl.apply(job("urgent", namespace, priority=5, steps=10))
                asked = kubectl.until("disturbed", lambda status: status.get("preemption") is not None)
            kubectl.until("urgent", succeeded)
            ended = kubectl.until("disturbed", succeeded)
            kubectl.apply(job("peaceful", namespace))
            kubectl.until("peaceful", succeeded)
    assert asked["preemption"]["byName"] == f"{namespace}/urgent"
    assert ended["preemptionCount"] == 1
    assert ended["attempt"]["number"] == 3
    disturbed, peaceful = (history(tmp_path, namespace, name) for name in ("disturbed", "peaceful"))
    assert [record.step for record in peaceful] == list(range(1, STEPS + 1))
    assert [(record.step, record.loss) for record in disturbed] == [(record.step, record.loss) for record in peaceful]
    assert {record.attempt for record in disturbed} == {1, 2, 3}, "each attempt goes on from a checkpoint"
    lost = {entry["cause"]: entry["milliseconds"] for entry in ended["accounting"]["lost"]}
    assert "RankKilled" in lost, lost


class Kubectl:
    """kubectl, as a person has it."""

    def __init__(self, environment: Mapping[str, str], *, patience_s: float = PATIENCE_S) -> None:
        self._environment, self._patience_s = environment, patience_s

    def __call__(self, *arguments: str, given: str | None = None) -> str:
        """Run it and return what it prints."""
        done = subprocess.run(
            ["kubectl", *arguments],
            env=dict(self._environment),
            input=given,
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )
        assert done.returncode == 0, f"kubectl {' '.join(arguments)}: {done.stderr}"
        return done.stdout

    def apply(self, manifest: Mapping[str, Any]) -> None:
        self("apply", "-f", "-", given=yaml.safe_dump(dict(manifest)))

    def until(self, name: str, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """Wait until something holds of a job's status."""
        deadline_s = time.monotonic() + self._patience_s
        status: dict[str, Any] = {}
        while time.monotonic() < deadline_s:
            status = json.loads(self("get", "trainingjob", name, "-o", "json")).get("status") or {}
            if status and holds(status):
                return status
            time.sleep(0.2)
        raise AssertionError(f"{name} after {self._patience_s} s: {json.dumps(status, indent=1)}")


def succeeded(status: dict[str, Any]) -> bool:
    kinds = {entry["type"]: entry["status"] for entry in status.get("conditions") or ()}
    assert kinds.get("Failed") != "True", status
    return kinds.get("Succeeded") == "True"


def queue(namespace: str) -> dict[str, Any]:
    spec = {"quotas": [{"resource": RESOURCE, "nominal": 2}], "preemption": {"cooldownSeconds": 0}}
    return {"apiVersion": labels.API_VERSION, "kind": "TrainingQueue", "metadata": {"name": namespace}, "spec": spec}


def job(name: str, namespace: str, *, priority: int = 0, steps: int = STEPS) -> dict[str, Any]:
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": name},
        "spec": {
            "queueName": namespace,
            "priority": priority,
            "model": {"preset": "kimi-vl-nano"},
            "data": {"sequenceTokens": 160, "seed": 17, "sources": [{"name": "one", "dataset": "sample/digits-1"}]},
            "training": {"steps": steps, "packsPerStep": 2, "seed": 1},
            "parallelism": {"mode": "Explicit", "dp": 2, "ep": 2},
            "workers": {"replicas": 2, "devices": 1},
            "checkpoint": {"everySteps": 5, "keep": 2},
        },
    }


def trained(folder: Path, namespace: str, name: str, *, attempt: int) -> int:
    """Steps that an attempt has trained so far."""
    root = folder / "home/checkpoints" / namespace / name
    path = root / steps_key(attempt)
    return path.read_bytes().count(b"\n") if path.exists() else 0


def until_trained(
    folder: Path, namespace: str, name: str, *, attempt: int, steps: int, patience_s: float = PATIENCE_S
) -> None:
    """Wait until an attempt has trained so many steps.

    Without kubectl, which takes so long that a fast machine trains all steps meanwhile.
    """
    deadline_s = time.monotonic() + patience_s
    while (now := trained(folder, namespace, name, attempt=attempt)) < steps:
        assert time.monotonic() < deadline_s, f"{name} has trained {now} of {steps} steps after {patience_s} s"
        time.sleep(0.002)


def rank_of(folder: Path, name: str, *, index: int, rank: int | None = None) -> int:
    """Process of a rank of a worker; of the one that it has, where none is named."""
    (path,) = (folder / "home/nodes").glob(f"*/{name}-*-{index}-0/{PROCESSES_FILE}")
    process: int = json.loads(path.read_text())["ranks"][str(index if rank is None else rank)]
    return process


def kill_rank(folder: Path, name: str, *, index: int, rank: int | None = None) -> None:
    """Kill a rank of a worker; the one that it has, where none is named."""
    os.kill(rank_of(folder, name, index=index, rank=rank), signal.SIGKILL)


@contextlib.contextmanager
def held_still(process: int) -> Iterator[None]:
    """Stop a process, and let it run again once it has been asked to end."""
    os.kill(process, signal.SIGSTOP)
    deadline_s = time.monotonic() + PATIENCE_S
    try:
        while not is_stopped(process) and time.monotonic() < deadline_s:
            time.sleep(0.01)
        yield
        deadline_s = time.monotonic() + PATIENCE_S
        while not is_asked_to_end(process) and time.monotonic() < deadline_s:
            time.sleep(0.05)
    finally:
        wake(process)


def history(folder: Path, namespace: str, name: str) -> Sequence[StepRecord]:
    """Steps of the committed history, each with its loss, to the last bit."""
    return read_records(folder / "home/checkpoints" / namespace / name).history
