"""Leaders of jobs that tests play: they sign what they say with the key in the job's Secret, as launchers do."""

import base64
from collections.abc import Iterable, Mapping
from typing import Any

from polyreme_api import labels
from polyreme_api.progress import ProgressRecord
from polyreme_api.signed_progress import ProgressSigner
from polyreme_cluster.port import Manifest


class Leaders:
    """The leader of each job."""

    def __init__(self) -> None:
        self._signers: dict[str, ProgressSigner] = {}

    def forget(self, uid: str) -> None:
        """Have the next leader of a job read its Secret, as another pod does."""
        self._signers.pop(uid, None)

    def annotations(
        self, job: Manifest, record: ProgressRecord, secrets: Iterable[Mapping[str, Any]], *, at_s: float
    ) -> dict[str, str]:
        """Return the annotations of the Lease with which a job's leader says a record; one of 0.1.0 does not sign."""
        metadata = job["metadata"]
        uid, attempt = metadata["uid"], job["status"]["attempt"]
        if not attempt.get("keyId"):
            said = record.model_copy(update={"updated_at_s": at_s})
            return {labels.ANNOTATION_PROGRESS: said.model_dump_json(by_alias=True)}
        if uid not in self._signers:
            names = {attempt.get("secretName") or labels.job_object_name(metadata["name"], uid)}
            (data,) = (secret["data"] for secret in secrets if secret["metadata"]["name"] in names)
            self._signers[uid] = ProgressSigner(base64.b64decode(data[labels.SECRET_KEY]), uid)
        return self._signers[uid].annotations(record, at_s=at_s)
