"""Reader of what jobs left in buckets, with the credentials of this process, and in folders that its user has named.

A console of all users has none: it would read for each of them what any job's location names.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from polyreme.console.kept import Kept
from polyreme.console.run_source import Curve
from polyreme.console.step_curves import CURVES_KEPT, STEPS_MAX, curve_of
from polyreme.report.comparison import losses_of
from polyreme.run_files.records import read_records_in
from polyreme.run_files.stored_logs import PATIENCE
from polyreme_api.clock import Clock
from polyreme_api.history import REJECTIONS
from polyreme_api.store import ObjectStore, StoreFailedError
from polyreme_api.urls import is_bucket
from polyreme_datahub.objects import bucket_of, open_store

CREDENTIALS = ("AWS_ACCESS_KEY_ID", "AWS_WEB_IDENTITY_TOKEN_FILE", "AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
"""Variables that name credentials of buckets; a process that has some sets at least one."""
WAITED_S, AWAY_S = 2.0, 30.0
"""A bucket that fails after so long is not asked again for a while: a comparison reads up to 100 jobs of it."""
NO_CREDENTIALS = "start the console with AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of the bucket"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class JobSteps:
    """What the steps of a job show."""

    curve: Curve = dataclasses.field(default_factory=Curve)
    figures: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    said: str = ""
    """Why there are none."""


class BucketReader:
    """Reads buckets; each thread may ask.

    Args:
        environment: Of this process.
        clock: Of this machine.
        folders: URLs of folders of this machine with checkpoint roots; a root elsewhere is of another machine.
    """

    def __init__(self, environment: Mapping[str, str], clock: Clock, folders: Sequence[str] = ()) -> None:
        self._clock, self._folders = clock, folders
        self._away: tuple[str, float, StoreFailedError] | None = None
        """The bucket that kept a reader waiting for nothing, until when it is not asked again, and what it said."""
        self._can_read = any(environment.get(name) for name in CREDENTIALS)
        self._lock = threading.Lock()
        self._kept = Kept[JobSteps](CURVES_KEPT)

    def reads(self, root: str | None) -> bool:
        """Tell whether a checkpoint root can be read."""
        if root is None or is_bucket(root):
            return self._can_read and root is not None
        return "/../" not in f"{root}/" and any(f"{root}/".startswith(f"{folder}/") for folder in self._folders)

    def steps(self, root: str) -> JobSteps:
        """Read the steps below a job's checkpoint root.

        Raises:
            RefusedError: If there are more than a page reads.
            StoreFailedError: If the bucket does not answer, or refuses the credentials.
        """
        if not self.reads(root):
            return JobSteps(said=NO_CREDENTIALS if is_bucket(root) else "")
        bucket = bucket_of(root)[0] if is_bucket(root) else root
        with self._lock:
            began_s = self._clock.steady_s()
            if self._away is not None and self._away[0] == bucket and began_s < self._away[1]:
                raise self._away[2].with_traceback(None)
            try:
                return self._read(root)
            except StoreFailedError as error:
                ended_s = self._clock.steady_s()
                if ended_s - began_s >= WAITED_S:
                    self._away = bucket, ended_s + AWAY_S, error
                raise

    def _read(self, root: str) -> JobSteps:
        store = open_store(root, patience=PATIENCE)
        stamp = _stamp(store)
        if not stamp:
            return JobSteps()  # what else is there is not listed: the location may be any bucket
        found = self._kept.get(root, stamp)
        if found is None:
            history = read_records_in(store, most=STEPS_MAX).history
            found = JobSteps(curve=curve_of(history), figures=losses_of(history) if history else {})
            self._kept.put(root, stamp, found)
        return found


def _stamp(store: ObjectStore) -> list[tuple[str, int]]:
    """Return what changes when the committed steps do."""
    return [
        (info.key, info.size_bytes) for prefix in ("attempts/", REJECTIONS, "steps/a") for info in store.list(prefix)
    ]
