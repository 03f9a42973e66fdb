"""Bearer tokens of the embedded API: one for everything, and one per job with the least rights that its launcher needs.

Tokens live in this process only and are handed to a pod by its kubelet, as a service account's are; nothing of them is
stored.
"""

from __future__ import annotations

import dataclasses
import secrets

from polyreme_api.labels import job_object_name
from polyreme_cluster.port import ObjectRef

TOKEN_BYTES = 32
READS = frozenset({"get", "list", "watch"})


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rights:
    """What a token may do."""

    everything: bool = False
    job: ObjectRef | None = None
    """The job that may be read."""
    lease: ObjectRef | None = None
    """The Lease that may be read, created and patched."""

    def allow(self, verb: str, ref: ObjectRef) -> bool:
        """Tell whether ``verb`` (get, list, watch, create, patch, delete) on an object is allowed.

        ``ref.name`` is the one name that a list or watch is narrowed to, else empty.
        """
        if self.everything:
            return True
        if verb in READS:
            return ref in {self.job, self.lease}
        return verb in {"create", "patch"} and ref == self.lease


class TokenTable:
    """The tokens that this process has issued."""

    def __init__(self) -> None:
        self._rights: dict[str, Rights] = {}
        self._by_job: dict[str, str] = {}
        self.admin = self._issue(Rights(everything=True))

    def for_job(self, *, namespace: str, job: str, uid: str) -> str:
        """Return the token of a job's launchers, the same for all of them."""
        if uid not in self._by_job:
            lease = ObjectRef(kind="Lease", namespace=namespace, name=job_object_name(job, uid))
            rights = Rights(job=ObjectRef(kind="TrainingJob", namespace=namespace, name=job), lease=lease)
            self._by_job[uid] = self._issue(rights)
        return self._by_job[uid]

    def rights(self, token: str) -> Rights | None:
        """Return what a token may do, None for one that was never issued."""
        # Looked up by digest-like random text of 256 bits: timing tells nothing that helps to guess one.
        return self._rights.get(token)

    def _issue(self, rights: Rights) -> str:
        token = secrets.token_urlsafe(TOKEN_BYTES)
        self._rights[token] = rights
        return token
