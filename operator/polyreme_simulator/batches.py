"""Batches of intents: each is settled, entry by entry, before the next is written."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from polyreme_api import labels
from polyreme_cluster.port import Manifest
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState


@dataclasses.dataclass(slots=True, eq=False)
class BatchFacts:
    """The admissions that are about to be written to jobs."""

    observed: ObservedState
    _entries: list[dict[str, Any]] = dataclasses.field(default_factory=list)
    _refused: set[str] = dataclasses.field(default_factory=set)
    """Jobs of the batch whose write was refused: that is an answer, so none of their writes is in flight."""

    def changed(self, manifest: Manifest, world: ClusterView) -> None:
        """Take a change of the object that stores the batch."""
        if manifest["metadata"]["name"] != labels.INTENTS_NAME:
            return
        text = (manifest.get("data") or {}).get("intents.json")
        # Without a batch: a replica that reads it cancels every admission before the next one.
        entries = self._entries if text is None else json.loads(text)
        if entries == self._entries:
            return
        for entry in self._entries:
            if self._open(entry):
                what = f"{entry['name']} attempt {entry['attempt']} may still begin"
                self.observed.broke("a batch is settled before the next", what, world)
        self._entries, self._refused = entries, set()

    def refused(self, uid: str) -> None:
        """Take that a write of a job's status was refused."""
        self._refused.add(uid)

    def intended(self, uid: str, job: Manifest) -> bool:
        """Tell whether the round that admits others admits this job, too: its writes land in any order."""
        status = job.get("status") or {}
        wanted = (uid, (status.get("attempt") or {}).get("number", 0) + 1, status.get("cancelledAdmissions", 0))
        return any((entry["uid"], entry["attempt"], entry["cancelledAdmissions"]) == wanted for entry in self._entries)

    def _open(self, entry: dict[str, Any]) -> bool:
        """Tell whether the write may still land: what settles an entry is never undone.

        An admission is decided on a state in which its job has not ended, and names that state's version: once the job
        has ended, the write conflicts (``test_an_admission_never_lands_on_a_job_that_has_ended``).
        """
        uid = entry["uid"]
        job = self.observed.jobs.get(uid)
        if job is None or uid in self._refused or self.observed.true(uid, "Succeeded", "Failed"):
            return False
        status = job.get("status") or {}
        begun = (status.get("attempt") or {}).get("number", 0) >= entry["attempt"]
        return not begun and status.get("cancelledAdmissions", 0) <= entry["cancelledAdmissions"]
