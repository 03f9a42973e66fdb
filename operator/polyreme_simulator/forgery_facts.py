"""Rules for records that another account wrote on a job's Lease: none changes the job's status."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest
from polyreme_local.api_server.record import frozen
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

FORGED_STEP = 987_654
"""Step of every forged record: no job trains so long."""
FORGED_WORDS = "said by another account"
_MARKS = (frozen(FORGED_STEP), FORGED_WORDS.encode())


@dataclasses.dataclass(slots=True, eq=False)
class ForgeryFacts:
    """What another account wrote."""

    observed: ObservedState
    _forged: set[tuple[str, str]] = dataclasses.field(default_factory=set)

    def forged(self, annotations: Mapping[str, str]) -> None:
        """Note a record that no leader of its job said."""
        self._forged.add(_key(annotations))

    def is_forged(self, annotations: Mapping[str, str]) -> bool:
        """Tell whether no leader of its job said a record."""
        return _key(annotations) in self._forged

    def changed(self, blob: bytes, before: dict[str, Any], after: Manifest, world: ClusterView) -> None:
        """Check a job's new status."""
        name, status = after["metadata"]["name"], after.get("status") or {}
        if any(mark in blob for mark in _MARKS):
            self.observed.broke("a forged record changes no status", f"{name}: {status}", world)
        old, new = before.get("attempt") or {}, status.get("attempt") or {}
        fell = status.get("progressSequence", 0) < before.get("progressSequence", 0)
        if fell and old.get("number") == new.get("number"):
            what = f"{name} from {before['progressSequence']} to {status.get('progressSequence', 0)}"
            self.observed.broke("no record counts after a newer one", what, world)


def _key(annotations: Mapping[str, str]) -> tuple[str, str]:
    return annotations.get(labels.ANNOTATION_PROGRESS, ""), annotations.get(labels.ANNOTATION_SIGNATURE, "")
