"""The job that an object of the simulated cluster belongs to, and which objects most oracles skip."""

from __future__ import annotations

from polyreme_api import labels
from polyreme_cluster.port import Manifest

MALFORMED = "malformed-"
"""Prefix of the names of objects that break their schemas: oracles, kubelets and kube-scheduler skip them."""
FOREIGN = "foreign-queue-"
"""Prefix of the names of jobs that no queue accepts, and of their queues; only one oracle knows them."""


def owner_uid(manifest: Manifest) -> str:
    """Return the UID of the TrainingJob that controls an object; empty for anybody else's, whatever its labels say."""
    for reference in manifest["metadata"].get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == labels.KIND_JOB:
            return str(reference["uid"])
    return ""


def is_set_apart(manifest: Manifest) -> bool:
    """Tell whether an object is one of those that break their schemas, or that no queue accepts."""
    return bool(manifest["metadata"]["name"].startswith((MALFORMED, FOREIGN)))
