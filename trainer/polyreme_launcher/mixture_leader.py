"""Changes of the mixture in a running attempt: index 0's launcher writes the schedule down, rank 0 fixes what is new.

Rank 0 knows the step that all ranks train, since all agree on each. So it can name a window that no rank has looked
at, fixes by create-if-absent that the change begins there, and says with the step's all-reduce that there is something
to read. If it dies between the two, the next attempt's leader finds the change (ADR 43).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from polyreme_api.checkpoint_inventory import read_mixture
from polyreme_api.history import mixture_key, mixture_prefix
from polyreme_api.job.data import MixtureChange
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_planner.mixture import STEPS_AHEAD_MAX, next_mixture
from polyreme_system.files import write_atomically

SCHEDULE_FILE = "schedule.json"
"""In the pod's folder: ``spec.data.schedule`` as index 0's launcher saw it last."""
_SCHEDULE = TypeAdapter(list[MixtureChange])

_log = logging.getLogger(__name__)


class MixtureLeader:
    """Fixes appended changes of the mixture, once each.

    Args:
        file: Where the launcher writes the schedule.
        store: The checkpoint root.
        attempt: The attempt of this rank.
        spec: The job's specification as the attempt began with it.
    """

    def __init__(self, file: Path, store: ObjectStore, *, attempt: int, spec: TrainingJobSpec) -> None:
        self._file, self._store, self._attempt, self._spec = file, store, attempt, spec
        self._seen: tuple[int, int] | None = None

    def __call__(self, step: int) -> bool:
        """Fix what was appended since the last call; tell whether other ranks have something to read.

        Args:
            step: The step that is trained now.

        Raises:
            StoreFailedError: If the store stays away.
        """
        schedule = self._changed()
        known = None if schedule is None else read_mixture(self._store, self._attempt)
        if known is None or schedule is None or len(schedule) <= known.read:
            return False
        data = self._spec.data.model_copy(update={"schedule": schedule})
        spec = self._spec.model_copy(update={"data": data})
        fixed = next_mixture(spec, known, after_step=step + STEPS_AHEAD_MAX)
        self._put(fixed)
        for change in fixed.changes[len(known.changes) :]:
            words = "weights that data.schedule has from step %d take effect at step %d"
            _log.warning(words, change.from_step, change.step)
        if ignored := fixed.read - known.read - (len(fixed.changes) - len(known.changes)):
            _log.warning("%d new entries of data.schedule can't be applied and are ignored", ignored)
        return True

    def _changed(self) -> list[MixtureChange] | None:
        """Return the schedule if its file was replaced since the last call: a look costs microseconds."""
        try:
            found = self._file.stat()
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return None
            self._seen, text = seen, self._file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return _SCHEDULE.validate_json(text)
        except ValidationError as error:
            _log.error("appended changes of the mixture can't be read: %s", error)
            return None

    def _put(self, fixed: MixtureRecord) -> None:
        """Create the next record of this attempt; only this rank does, so a number that is taken was its own."""
        taken = sum(1 for _ in self._store.list(mixture_prefix(self._attempt)))
        with contextlib.suppress(ObjectExistsError):
            self._store.put_if_absent(
                mixture_key(self._attempt, taken + 1), fixed.model_dump_json(by_alias=True).encode()
            )


def write_schedule(directory: Path, schedule_json: str) -> None:
    """Write the schedule down for rank 0; what can't be written takes effect with the next attempt."""
    try:
        write_atomically(directory / SCHEDULE_FILE, schedule_json, durable=False)
    except OSError as error:
        print(f"changes of data.schedule can't be passed to the ranks: {error}", file=sys.stderr)
