"""Signatures of progress records, by which the operator knows that a job's own leader wrote one.

The operator derives a key for each job from the key of the installation and the job's UID, and gives it to the job's
pods in a Secret. A leader signs the exact text of each record together with the job's UID. The text holds a sequence
number, so that a record that was written before is known as such. HMAC-SHA-256, RFC 2104; to derive keys: NIST SP
800-108, one block.
"""

from __future__ import annotations

import hmac
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import ValidationError

from polyreme_api.labels import ANNOTATION_PROGRESS, ANNOTATION_SIGNATURE
from polyreme_api.progress import ProgressRecord

KEY_BYTES = 32
KEY_ID_CHARACTERS = 8
_JOB_KEY = b"polyreme.dev/job-key\0"
_KEY_ID = b"polyreme.dev/key-id\0"
_RECORD = b"polyreme.dev/progress\0"
"""Purpose of each digest: none of them can be used as another, nor as a launcher's proof to its peers."""


def job_key(installation_key: bytes, job_uid: str) -> bytes:
    """Derive the key that a job's pods share."""
    return hmac.digest(installation_key, _JOB_KEY + job_uid.encode(), "sha256")


def key_id(installation_key: bytes) -> str:
    """Return the name of an installation's key, which says nothing about its bytes."""
    return hmac.digest(installation_key, _KEY_ID, "sha256").hex()[:KEY_ID_CHARACTERS]


def signature_of(text: str, *, key: bytes, job_uid: str) -> str:
    """Sign the text of a record."""
    # What anybody may have stored need not be Unicode.
    return hmac.digest(key, _RECORD + job_uid.encode() + b"\0" + text.encode(errors="surrogatepass"), "sha256").hex()


def is_signed(text: str, signature: str, *, keys: Iterable[bytes], job_uid: str) -> bool:
    """Tell whether a text was signed with one of a job's keys, in constant time for each."""
    given = signature.encode(errors="surrogatepass")
    return any(hmac.compare_digest(signature_of(text, key=key, job_uid=job_uid).encode(), given) for key in keys)


class ProgressSigner:
    """Writes the records of one leader, and reads those that leaders of its job wrote before it.

    Args:
        key: The job's key.
        job_uid: UID of the job.
    """

    def __init__(self, key: bytes, job_uid: str) -> None:
        self._key, self._job_uid = key, job_uid
        self._sequence = 0

    def annotations(self, record: ProgressRecord, *, at_s: float) -> dict[str, str]:
        """Return the annotations of a Lease that say this record, with the next sequence number.

        Args:
            record: What to say.
            at_s: When, by the leader's clock.
        """
        self._sequence += 1
        numbered = record.model_copy(update={"updated_at_s": at_s, "sequence": self._sequence})
        text = numbered.model_dump_json(by_alias=True)
        signature = signature_of(text, key=self._key, job_uid=self._job_uid)
        return {ANNOTATION_PROGRESS: text, ANNOTATION_SIGNATURE: signature}

    def read(self, lease: Mapping[str, Any]) -> ProgressRecord | None:
        """Return the record on a Lease, and continue its numbers; None if no leader of the job wrote it."""
        annotations: Mapping[str, str] = lease["metadata"].get("annotations") or {}
        text, signature = annotations.get(ANNOTATION_PROGRESS, ""), annotations.get(ANNOTATION_SIGNATURE, "")
        if not is_signed(text, signature, keys=(self._key,), job_uid=self._job_uid):
            return None
        try:
            record = ProgressRecord.model_validate_json(text)
        except ValidationError:
            return None
        self._sequence = max(self._sequence, record.sequence)
        return record
