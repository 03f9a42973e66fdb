"""Gate before admission: a job holds no devices until its data is ready, or its first blocks are where it may start.

The datahub controller reports in an annotation of the job; the condition ``DataReady`` repeats the report. Only jobs
whose training polyreme launches have data that a controller prepares. With the gate off, a report is still shown, but
no job waits for it.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.data_report import DataReport, DataState
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.snapshot import Pending
from polyreme_operator.types.views import JobView

NOT_REPORTED = "no report yet from the datahub's controller"
OUTDATED = "the datahub controller's last report is about another data spec"
_REASONS = {
    DataState.PROCESSING: Reason.PROCESSING,
    DataState.READABLE: Reason.DATA_READABLE,
    DataState.PROCESSED: Reason.DATA_PROCESSED,
    DataState.FAILED: Reason.PROCESSING_FAILED,
    DataState.REFUSED: Reason.DATA_REFUSED,
    DataState.MISSING: Reason.DATA_MISSING,
}


@dataclasses.dataclass(frozen=True, slots=True)
class Readiness:
    """Value of the condition ``DataReady``."""

    ready: bool
    reason: Reason
    message: str


def prepares_data(job: JobView) -> bool:
    """Tell whether a controller prepares the data of a job."""
    return job.spec is not None and job.spec.workers.runtime.mode == "Launcher" and bool(job.spec.data.sources)


def readiness(job: JobView) -> Readiness | None:
    """Return what is known of a job's data; None if there is nothing to say."""
    if not prepares_data(job):
        return None
    report = job.data_report
    if report is not None and report.about == job.data_digest:
        return _reported(report)
    if report is None and job.attempt is not None:
        # A report that is lost takes nothing away from a job that has trained on its data.
        known = job.status.condition(ConditionType.DATA_READY)
        if known is not None and known.status == "True":
            return Readiness(True, Reason.DATA_PROCESSED, known.message)
    if report is None and not job.data_unreadable and not job.data_gate:
        return None
    if job.data_unreadable:
        return Readiness(False, Reason.REPORT_UNREADABLE, job.data_unreadable)
    return Readiness(False, Reason.NOT_REPORTED, NOT_REPORTED if report is None else OUTDATED)


def awaits_data(job: JobView) -> bool:
    """Tell whether a job's admission has to wait for its data. An admitted job stays admitted."""
    if not job.data_gate or job.admitted:
        return False
    known = readiness(job)
    return known is not None and not known.ready


def pending_data(job: JobView) -> Pending:
    """Return the pending reason of a job that waits for its data."""
    known = readiness(job)
    words = "" if known is None else known.message
    refused = known is not None and known.reason is Reason.DATA_REFUSED
    return Pending(Reason.DATA_REFUSED if refused else Reason.WAITING_FOR_DATA, f"waiting for data: {words}")


def _reported(report: DataReport) -> Readiness:
    words = report.words
    match report.state:
        case DataState.PROCESSING:
            words = words or "processing has begun"
        case DataState.FAILED:
            words = f"{words}; it is retried"
        case DataState.REFUSED:
            words = f"{words}; fix the dataset, or change the job's data"
        case DataState.MISSING:
            words = f"{words or 'processed data is gone'}; it is recreated"
        case _:
            pass
    return Readiness(report.state in {DataState.READABLE, DataState.PROCESSED}, _REASONS[report.state], words)
