"""Changes of a job in a running attempt: index 0's launcher writes down what may change, rank 0 fixes what is new.

Rank 0 knows the step that all ranks train, since all agree on each. So it can name a window that no rank has looked
at, fixes by create-if-absent that the change begins there, and says with the step's all-reduce that there is something
to read. If it dies between the two, the next attempt's leader finds the change (ADR 43).
"""

from __future__ import annotations

import contextlib
import logging
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from polyreme_api.checkpoint_inventory import read_mixture
from polyreme_api.history import mixture_key, mixture_prefix
from polyreme_api.job.data import MixtureChange
from polyreme_api.job.model import Training
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_planner.extension import Count, uncounted
from polyreme_planner.mixture import STEPS_AHEAD_MAX, next_mixture, training_words
from polyreme_system.files import write_atomically

CHANGES_FILE = "changes.json"
"""In the pod's folder: what of the spec may change while ranks train, as index 0's launcher saw it last."""


class Changes(BaseModel):
    """What of a spec may change while ranks train."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schedule: list[MixtureChange] = Field(default_factory=list)
    """``spec.data.schedule``."""
    training: Training | None = None
    """``spec.training``; None: the job has none of ours."""


def changes_of(spec: Mapping[str, Any]) -> dict[str, Any]:
    """Return what may change of a spec as it is written in YAML, as the content of ``CHANGES_FILE``."""
    return {"schedule": (spec.get("data") or {}).get("schedule") or [], "training": spec.get("training")}


_log = logging.getLogger(__name__)


class MixtureLeader:
    """Fixes appended changes of the mixture, and a changed end of the run, once each.

    Args:
        file: Where the launcher writes what may change.
        store: The checkpoint root.
        attempt: The attempt of this rank.
        spec: The job's specification as the attempt began with it.
        count: Counts the steps of epochs.
    """

    def __init__(
        self, file: Path, store: ObjectStore, *, attempt: int, spec: TrainingJobSpec, count: Count = uncounted
    ) -> None:
        self._file, self._store, self._attempt, self._spec, self._count = file, store, attempt, spec, count
        self._seen: tuple[int, int] | None = None

    def __call__(self, step: int, note: Callable[[str], None] = lambda _: None) -> bool:
        """Fix what was appended since the last call; tell whether other ranks have something to read.

        Args:
            step: The step that is trained now.
            note: Takes a sentence on what becomes of a changed end of the run.

        Raises:
            StoreFailedError: If the store stays away.
        """
        changes = self._changed()
        known = None if changes is None else read_mixture(self._store, self._attempt)
        if known is None or changes is None:
            return False
        data = self._spec.data.model_copy(update={"schedule": changes.schedule})
        training = changes.training or self._spec.training
        spec = self._spec.model_copy(update={"data": data, "training": training})
        after_step = step + STEPS_AHEAD_MAX
        for sentence in training_words(spec, known, after_step=after_step, count=self._count):
            _log.warning("%s", sentence)
            note(sentence)
        fixed = next_mixture(spec, known, after_step=after_step, count=self._count)
        if fixed == known:
            return False
        self._put(fixed)
        for change in fixed.changes[len(known.changes) :]:
            words = "weights that data.schedule has from step %d take effect at step %d"
            _log.warning(words, change.from_step, change.step)
        if ignored := fixed.read - known.read - (len(fixed.changes) - len(known.changes)):
            _log.warning("%d new entries of data.schedule can't be applied and are ignored", ignored)
        return True

    def _changed(self) -> Changes | None:
        """Return what may change if its file was replaced since the last call: a look costs microseconds."""
        try:
            found = self._file.stat()
            seen = (found.st_ino, found.st_mtime_ns)
            if seen == self._seen:
                return None
            self._seen, text = seen, self._file.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return Changes.model_validate_json(text)
        except ValidationError as error:
            _log.error("changes of the job can't be read: %s", error)
            return None

    def _put(self, fixed: MixtureRecord) -> None:
        """Create the next record of this attempt; only this rank does, so a number that is taken was its own."""
        taken = sum(1 for _ in self._store.list(mixture_prefix(self._attempt)))
        with contextlib.suppress(ObjectExistsError):
            self._store.put_if_absent(
                mixture_key(self._attempt, taken + 1), fixed.model_dump_json(by_alias=True).encode()
            )


def write_changes(directory: Path, changes_json: str) -> None:
    """Write down for rank 0 what may change; what can't be written takes effect with the next attempt."""
    try:
        write_atomically(directory / CHANGES_FILE, changes_json, durable=False)
    except OSError as error:
        print(f"changes of the job can't be passed to the ranks: {error}", file=sys.stderr)
