"""Jobs that need their data prepared, decided from their objects alone."""

from __future__ import annotations

import dataclasses
import logging
from collections import OrderedDict
from typing import Any

from polyreme_api import labels
from polyreme_api.data_report import DataReport, DataState, data_digest, read_report
from polyreme_api.job import TrainingJob, parse_job
from polyreme_cluster.port import Manifest, ObjectRef

SPECS_KEPT = 4096
"""Specs that are kept parsed, by UID and generation."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A job whose data a controller prepares."""

    job: TrainingJob
    ref: ObjectRef
    version: int
    about: str
    """Digest of the data part of its spec."""
    report: DataReport | None
    """What was reported about this data; a report that can't be read, or is about other data, counts as none."""

    @property
    def uid(self) -> str:
        """UID of the job."""
        return self.job.metadata.uid

    @property
    def state(self) -> DataState | None:
        """What is reported about its data."""
        return None if self.report is None else self.report.state

    @property
    def asks(self) -> bool:
        """Whether its data has to be prepared: a suspended job keeps what it has, and asks for nothing."""
        return self.state is not DataState.PROCESSED and not self.job.spec.suspend

    @property
    def age(self) -> tuple[str, str, str]:
        """Rank among jobs that wait, the oldest first."""
        metadata = self.job.metadata
        return metadata.creation_timestamp or "", metadata.namespace, metadata.name


class CandidateReader:
    """Reads jobs; a spec is parsed once for each generation."""

    def __init__(self) -> None:
        self._parsed: OrderedDict[tuple[str, int], tuple[TrainingJob, str] | None] = OrderedDict()

    def read(self, manifest: Manifest) -> Candidate | None:
        """Return the candidate that an object is; None for a job whose data needs no preparation."""
        metadata: dict[str, Any] = manifest["metadata"]
        if metadata.get("deletionTimestamp") or _finished(manifest):
            return None
        key = (str(metadata["uid"]), int(metadata.get("generation") or 0))
        if key not in self._parsed:
            self._parsed[key] = _parse(manifest)
            if len(self._parsed) > SPECS_KEPT:
                self._parsed.popitem(last=False)
        parsed = self._parsed[key]
        if parsed is None:
            return None
        job, about = parsed
        report, _ = read_report(metadata.get("annotations"))
        known = report if report is not None and report.about == about else None
        version = int(metadata["resourceVersion"])
        return Candidate(job=job, ref=ObjectRef.of(manifest), version=version, about=about, report=known)


def _parse(manifest: Manifest) -> tuple[TrainingJob, str] | None:
    try:
        job = parse_job({name: part for name, part in manifest.items() if name != "status"})
        spec = job.spec
        if spec.managed_by != labels.MANAGER or spec.workers.runtime.mode != "Launcher":
            return None
        return job, data_digest(spec)
    except Exception as error:  # noqa: BLE001 - whatever is stored must not stop the controller
        # The operator says so in the job's status.
        _log.debug("job %s can't be read: %s", manifest["metadata"].get("name"), error)
        return None


def _finished(manifest: Manifest) -> bool:
    status = manifest.get("status")
    conditions = status.get("conditions") if isinstance(status, dict) else None
    return any(
        isinstance(each, dict) and each.get("type") in {"Succeeded", "Failed"} and each.get("status") == "True"
        for each in (conditions if isinstance(conditions, list) else ())
    )
