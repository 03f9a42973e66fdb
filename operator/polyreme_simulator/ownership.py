"""The job that an object of the simulated cluster belongs to, and which objects are malformed."""

from __future__ import annotations

from polyreme_api import labels
from polyreme_operator.port import Manifest

MALFORMED = "malformed-"
"""Prefix of the names of objects that break their schemas: oracles, kubelets and kube-scheduler skip them."""


def owner_uid(manifest: Manifest) -> str:
    """Return the UID of the TrainingJob that controls an object; empty for anybody else's, whatever its labels say."""
    for reference in manifest["metadata"].get("ownerReferences") or ():
        if reference.get("controller") and reference.get("kind") == labels.KIND_JOB:
            return str(reference["uid"])
    return ""


def is_malformed(manifest: Manifest) -> bool:
    """Tell whether an object is one of those that break their schemas."""
    return bool(manifest["metadata"]["name"].startswith(MALFORMED))
