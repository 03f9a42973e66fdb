"""Rules for data: no job holds devices before its data is ready, and none waits for data that is ready."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api.data_report import DataReport, DataState, data_digest, read_report
from polyreme_api.job import parse_job
from polyreme_cluster.port import Manifest, WatchEventType
from polyreme_local.api_server.record import Change
from polyreme_simulator.anomaly_facts import AnomalyFacts
from polyreme_simulator.cluster_history import ClusterHistory
from polyreme_simulator.cluster_view import ClusterView
from polyreme_simulator.observed_state import ObservedState

FOLLOWS_S = 10.0
"""Time within which a job stops to wait for data after it was reported as ready."""


@dataclasses.dataclass(slots=True, eq=False)
class DataFacts:
    """What was reported about each job's data."""

    observed: ObservedState
    history: ClusterHistory
    anomalies: AnomalyFacts
    gated: bool = False
    """Whether the operator's settings say that a datahub controller serves this cluster."""
    _about: dict[str, str] = dataclasses.field(default_factory=dict)
    _ready_s: dict[str, float] = dataclasses.field(default_factory=dict)
    """Since when the data of a job has been reported as ready, by UID."""

    def changed(self, change: Change, world: ClusterView) -> None:
        """Take a change of a job."""
        manifest, uid = change.record.manifest, change.record.uid
        if not self.gated or change.type is WatchEventType.DELETED:
            self._ready_s.pop(uid, None)
        elif self.reported(manifest) is DataState.PROCESSED:
            self._ready_s.setdefault(uid, world.time_s())
        else:
            self._ready_s.pop(uid, None)

    def reported(self, job: Manifest) -> DataState | None:
        """Return what is reported about a job's data; None without a report on this data that can be read."""
        report = self._report(job)
        return report.state if report is not None and report.about == self._digest(job) else None

    def awaits(self, job: Manifest) -> bool:
        """Tell whether a job without an admission has to wait for its data, or may have to."""
        return self.gated and self.reported(job) is not DataState.PROCESSED

    def may_have_awaited(self, uid: str, job: Manifest, world: ClusterView) -> bool:
        """Tell whether a job without an admission waited for its data by anything that may be known of it now."""
        if not self.gated:
            return False
        if (job.get("status") or {}).get("attempt") is not None and self._report(job) is None:
            # A report that is lost takes nothing away from a job that has had its data.
            return False
        return self._ready_s.get(uid, float("inf")) > self.history.known_since_s(world)

    def admitted(self, uid: str, before: Mapping[str, Any], world: ClusterView) -> None:
        """Check an admission, whose write holds for exactly the job that it saw.

        Args:
            uid: UID of the job.
            before: Its status before the write.
            world: The cluster.
        """
        if not self.gated:
            return
        job, attempts = self.observed.jobs[uid], before.get("attempt") is not None
        report, name = self._report(job), job["metadata"]["name"]
        if self.reported(job) is not DataState.PROCESSED and (not attempts or report is not None):
            # A report that is lost takes nothing away from a job that has had its data.
            said = "nothing" if report is None else report.state
            self.observed.broke("no job holds devices before its data is ready", f"{name}: {said} is reported", world)

    def look(self, world: ClusterView) -> None:
        """Check that no job waits for data that is reported as ready."""
        if not self.gated or self.history.blind(world) or self.anomalies.refused:
            # Where writes are refused, what jobs say may be old.
            return
        for uid, since_s in self._ready_s.items():
            job = self.observed.jobs.get(uid)
            if job is None or world.time_s() - max(since_s, world.calm_since_s) < FOLLOWS_S:
                continue
            conditions = {entry["type"]: entry for entry in (job.get("status") or {}).get("conditions") or ()}
            queued = conditions.get("Queued") or {}
            if queued.get("status") == "True" and queued["reason"] in {"WaitingForData", "DataRefused"}:
                what = f"{job['metadata']['name']} says {queued['reason']}, its data is ready since t={since_s:.0f}"
                self.observed.broke("no job waits for data that is ready", what, world)

    @staticmethod
    def _report(job: Manifest) -> DataReport | None:
        return read_report(job["metadata"].get("annotations"))[0]

    def _digest(self, job: Manifest) -> str:
        uid = job["metadata"]["uid"]
        if uid not in self._about:
            self._about[uid] = data_digest(parse_job({**job, "status": {}}).spec)
        return self._about[uid]
