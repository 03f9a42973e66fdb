"""Jobs that need their data prepared, decided from their objects alone."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

from polyreme_api import labels
from polyreme_api.data_report import DataReport, DataState, data_digest, read_report
from polyreme_api.job import TrainingJob, parse_job
from polyreme_cluster.port import ListPage, Manifest, ObjectRef, WatchEvent, WatchEventType

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


class WatchedJobs:
    """The jobs of a cluster whose data a controller prepares; a spec is parsed once for each generation.

    Args:
        changed: Called after each change.
    """

    def __init__(self, *, changed: Callable[[], None]) -> None:
        self._changed = changed
        self.jobs: dict[str, Candidate] = {}
        """By UID."""
        self.gone: set[str] = set()
        """UIDs of jobs that were seen, and have finished or were deleted."""
        self.listed = asyncio.Event()
        self._found: dict[str, Candidate] = {}
        """What the pages of the present list have shown."""
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

    def put_page(self, kind: str, page: ListPage, *, first: bool) -> None:
        """Read the jobs of a page."""
        del kind
        if first:
            self._found = {}
        candidates = (self.read(manifest) for manifest in page.items)
        self._found |= {each.uid: each for each in candidates if each is not None}

    def end_list(self, kind: str, *, version: int) -> None:
        """Take the jobs of the list instead of those that were known."""
        del kind, version
        self._replace(self._found)
        self.listed.set()

    def apply(self, kind: str, event: WatchEvent) -> None:
        """Take an event, unless a newer state is known."""
        del kind
        if event.type is WatchEventType.BOOKMARK:
            return
        uid = str(event.object["metadata"]["uid"])
        known = self.jobs.get(uid)
        if known is not None and int(event.resource_version) < known.version:
            return
        candidate = None if event.type is WatchEventType.DELETED else self.read(event.object)
        if candidate is not None:
            self.jobs[uid] = candidate
        elif self.jobs.pop(uid, None) is not None:
            self.gone.add(uid)
        self._changed()

    def clear(self, kind: str) -> None:
        """Forget all jobs: their kind is not installed."""
        del kind
        self._replace({})

    def broken(self, kind: str) -> bool:
        """Continue from the last version."""
        del kind
        return False

    def _replace(self, found: dict[str, Candidate]) -> None:
        self.gone |= self.jobs.keys() - found.keys()
        self.jobs = found
        self._changed()


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
