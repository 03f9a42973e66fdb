"""Thin images hold polyreme alone: those of others come from a read-only volume."""

import sysconfig
from typing import Any

CLAIM = "packages"
MOUNTED_AT = "/opt/packages"
"""On PYTHONPATH in every image; in a thin one it is empty."""
FOLDER = sysconfig.get_paths()["purelib"]
SIZE = "20Gi"
VOLUMES = [{"name": CLAIM, "persistentVolumeClaim": {"claimName": CLAIM, "readOnly": True}}]
MOUNTS = [{"name": CLAIM, "mountPath": MOUNTED_AT, "readOnly": True}]


def volume(namespace: str) -> list[dict[str, Any]]:
    """Return a volume of this environment's packages and the claim on it in a namespace: pods may not name a folder."""
    shared = {"storageClassName": "", "accessModes": ["ReadOnlyMany"]}
    name = f"{CLAIM}-{namespace}"
    return [
        {
            "apiVersion": "v1",
            "kind": "PersistentVolume",
            "metadata": {"name": name},
            "spec": {
                **shared,
                "capacity": {"storage": SIZE},
                "persistentVolumeReclaimPolicy": "Retain",
                "hostPath": {"path": FOLDER, "type": "Directory"},
            },
        },
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": CLAIM, "namespace": namespace},
            "spec": {**shared, "volumeName": name, "resources": {"requests": {"storage": SIZE}}},
        },
    ]
