"""The rule for jobs that no queue accepts: they are never admitted, and no other job is preempted for them."""

from __future__ import annotations

import dataclasses

from polyreme_api import labels
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import parse_job
from polyreme_cluster.port import Manifest
from polyreme_local.api_server.record import Change
from polyreme_planner.plan import plan_for
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState
from polyreme_simulator.ownership import FOREIGN

MISSING = f"{FOREIGN}missing"
"""A queue that does not exist."""
REFUSED = frozenset({"QueueRefused"})
UNSERVED = frozenset({"QueueMissing", "WaitingForData", "DataRefused"})
"""That a queue is missing is noticed when the data is ready."""


@dataclasses.dataclass(slots=True, eq=False)
class ForeignQueueFacts:
    """Which jobs these are, by the prefix of their names."""

    observed: ObservedState
    _uids: set[str] = dataclasses.field(default_factory=set)

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take one change of the store."""
        record = change.record
        if record.kind == "Pod" and record.name.startswith(FOREIGN):
            self.observed.broke("a refused job has no pods", record.name, world)
        if record.kind != labels.KIND_JOB:
            return
        status = record.manifest.get("status")
        status = status if isinstance(status, dict) else {}
        if record.name.startswith(FOREIGN):
            self._uids.add(record.uid)
            if status.get("attempt"):
                self.observed.broke("a refused job is never admitted", record.name, world)
        elif self._uids and (status.get("preemption") or {}).get("by") in self._uids:
            self.observed.broke("no job is preempted for a refused one", record.name, world)

    def check_end(self, world: ClusterView) -> None:
        """Check that each of them says that its queue refuses it, or is missing, or that no layout fits it."""
        for record in world.store.records(labels.KIND_JOB):
            if not record.name.startswith(FOREIGN):
                continue
            conditions = (record.manifest.get("status") or {}).get("conditions") or ()
            reasons = UNSERVED if record.manifest["spec"]["queueName"] == MISSING else REFUSED
            says_so = any(entry["type"] == "Queued" and entry["reason"] in reasons for entry in conditions)
            # A job without a layout is refused before its queue is asked, and that is final.
            unplanned = any(entry["type"] == "Failed" and entry["reason"] == "Misconfigured" for entry in conditions)
            if not says_so and not (unplanned and not _has_layout(record.manifest)):
                self.observed.broke("a refused job says so", f"{record.name}: {conditions}", world)


def _has_layout(job: Manifest) -> bool:
    try:
        plan_for(parse_job(job).spec)
    except InvalidConfigError:
        return False
    return True
