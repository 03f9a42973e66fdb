"""Keys of jobs, each derived from the key of the installation, so that no Secret of a job is ever read back."""

from __future__ import annotations

from polyreme_api.signed_progress import job_key, key_id


class JobKeys:
    """Derives the keys of jobs.

    Args:
        installation: Keys of the installation: the one for new gangs first, then earlier ones whose gangs still run.
            None, for readers other than the operator: they take what Leases say as it is.
    """

    def __init__(self, *installation: bytes) -> None:
        self._by_id = {key_id(key): key for key in installation}
        self.ids = tuple(self._by_id)
        """Names of the keys, in that order."""

    def of_job(self, uid: str) -> tuple[bytes, ...]:
        """Return the keys of a job, one for each key of the installation."""
        return tuple(job_key(key, uid) for key in self._by_id.values())

    def secret(self, uid: str, name: str) -> bytes:
        """Return the key of a job that is derived from a named key of the installation; without a name, from the first.

        Raises:
            KeyError: If the installation has no such key.
        """
        return job_key(self._by_id[name or self.ids[0]], uid)
