"""Progress records that count: a job's own leader signed it, and it is newer than all that counted before.

Every client that may patch a Lease can write its content. Where the pods of several jobs share a ServiceAccount, that
is each of their leaders. A record that does not count changes nothing.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from enum import StrEnum
from typing import Any, TypeAlias

from pydantic import ValidationError

from polyreme_api import labels
from polyreme_api.progress import ProgressRecord
from polyreme_api.signed_progress import is_signed
from polyreme_cluster.port import ObjectRef
from polyreme_operator.types.views import JobView

Order: TypeAlias = tuple[int, int, int]
"""Attempt, replacement of worker 0, sequence number."""


class RecordFault(StrEnum):
    """Why a record does not count; a label of the metric."""

    UNSIGNED = "Unsigned"
    FORGED = "Forged"
    """Its signature is none of the job's."""
    REPLAYED = "Replayed"
    """The job's leader signed it, and has signed a newer one since."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RefusedRecord:
    """A record that does not count."""

    ref: ObjectRef
    """Its job."""
    uid: str
    fault: RecordFault
    first: bool
    """Whether it is the job's first with this fault since the operator started."""


@dataclasses.dataclass(frozen=True, slots=True)
class SaidRecord:
    """What a Lease says, before anybody believes it."""

    text: str
    signature: str

    @classmethod
    def on(cls, metadata: Mapping[str, Any]) -> SaidRecord:
        """Read it from a Lease."""
        annotations = metadata.get("annotations") or {}
        said = (annotations.get(name) for name in (labels.ANNOTATION_PROGRESS, labels.ANNOTATION_SIGNATURE))
        return cls(*(value if isinstance(value, str) else "" for value in said))

    def read(self) -> ProgressRecord | None:
        """Return it as a record; None if it is none."""
        try:
            return ProgressRecord.model_validate_json(self.text) if self.text else None
        except ValidationError:
            return None

    def check(self, *, keys: tuple[bytes, ...], job_uid: str) -> RecordFault | None:
        """Return what is wrong with its signature; None if one of the job's keys made it."""
        if not self.text or not self.signature:
            return RecordFault.UNSIGNED
        return None if is_signed(self.text, self.signature, keys=keys, job_uid=job_uid) else RecordFault.FORGED


def can_sign(job: JobView) -> bool:
    """Tell whether the pods of a job's attempt sign their records; those of an operator of 0.1.0 can't.

    The job's own status says so, never the record. A reader without keys takes every record as it is.
    """
    return bool(job.key_ids) and (job.attempt is None or bool(job.attempt.key_id))


def oldest_that_counts(job: JobView) -> Order:
    """Return the order of the record that a job's status already holds: no older one counts."""
    attempt = job.attempt
    return (0, 0, 0) if attempt is None else (attempt.number, attempt.replacement(0), job.status.progress_sequence)
