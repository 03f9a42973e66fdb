"""Add-ons of a cluster with nodes: CoreDNS, a default storage class with a pool of volumes."""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from tools.cluster.servers import ServerError

MANIFESTS = Path(__file__).with_name("addons.yaml")
VOLUMES = 8
"""Volumes of the pool: a claim takes one and never gives it back."""
VOLUME_SIZE = "20Gi"
APPLY_S_MAX = 60


class Kubectl:
    """kubectl on one cluster.

    Args:
        program: Path of kubectl.
        kubeconfig: Of the cluster.
    """

    def __init__(self, program: Path, kubeconfig: Path) -> None:
        self._command = [str(program), "--kubeconfig", str(kubeconfig)]

    def __call__(self, *arguments: str, given: str | None = None, timeout_s: float = APPLY_S_MAX) -> str:
        """Run it and return what it prints.

        Raises:
            ServerError: If it fails.
        """
        done = subprocess.run(
            [*self._command, *arguments], input=given, capture_output=True, text=True, check=False, timeout=timeout_s
        )
        if done.returncode != 0:
            raise ServerError(f"kubectl {' '.join(arguments)} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def apply(self, manifests: Sequence[Any]) -> None:
        """Create or change objects; as JSON, in which text is never read as a number."""
        self(
            "apply",
            "--server-side",
            "--force-conflicts",
            "-f",
            "-",
            given=json.dumps({"apiVersion": "v1", "kind": "List", "items": list(manifests)}),
        )


def apply_addons(kubectl: Kubectl, folder: Path) -> None:
    """Apply them all."""
    volumes = [_volume(folder / "volumes" / str(number), number) for number in range(VOLUMES)]
    kubectl.apply([*yaml.safe_load_all(MANIFESTS.read_text()), *volumes])


def _volume(path: Path, number: int) -> dict[str, Any]:
    """All nodes are on this machine: a volume is reached from each of them."""
    path.mkdir(parents=True, exist_ok=True)
    # Pods run as users of their own, and a volume of this kind is not handed over to them.
    path.chmod(0o777)
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"volume-{number}"},
        "spec": {
            "storageClassName": "standard",
            "capacity": {"storage": VOLUME_SIZE},
            "accessModes": ["ReadWriteOnce"],
            "persistentVolumeReclaimPolicy": "Retain",
            "hostPath": {"path": str(path), "type": "Directory"},
        },
    }
