"""Owner of a node's repair: one annotation names it, and the marks of tools that do not know it are respected as well.

The annotation is taken and released in the same patch as the record, with the node's resource version, so two owners
can't both hold it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final

from polyreme_api import labels

REPAIR_OWNER: Final = f"{labels.GROUP}/repair-owner"
"""Annotation of a node: who repairs it now."""
OURS: Final = "polyreme"
OWNER_CHARACTERS_MAX: Final = 128
TAINTS: Final[Mapping[str, str]] = {
    "ToBeDeletedByClusterAutoscaler": "cluster-autoscaler",
    "karpenter.sh/disrupted": "karpenter",
    "karpenter.sh/disruption": "karpenter",
    "cloud.google.com/impending-node-termination": "gke",
    "aws-node-termination-handler/spot-itn": "aws-node-termination-handler",
    "aws-node-termination-handler/scheduled-maintenance": "aws-node-termination-handler",
    "aws-node-termination-handler/asg-lifecycle-termination": "aws-node-termination-handler",
    "remediation.medik8s.io/not-ready": "medik8s",
}
"""Taints by which another tool says that it removes or repairs the node, and that tool."""
ANNOTATIONS: Final[Mapping[str, str]] = {
    "quarantineHealthEvent": "nvsentinel",
    "weave.works/kured-reboot-in-progress": "kured",
    "kured.dev/reboot-in-progress": "kured",
}
"""Annotations that say the same, whatever their value."""


def other_owner(annotations: Mapping[str, Any], taints: Iterable[Mapping[str, Any]]) -> str:
    """Return who repairs a node instead of us; empty: no other tool does."""
    named = str(annotations.get(REPAIR_OWNER) or "")
    if named and named != OURS:
        return named[:OWNER_CHARACTERS_MAX]
    marked = [owner for key, owner in ANNOTATIONS.items() if annotations.get(key)]
    marked += [TAINTS[key] for taint in taints if (key := str(taint.get("key"))) in TAINTS]
    return marked[0] if marked else ""
