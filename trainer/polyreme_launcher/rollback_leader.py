"""Rollback after a spike of the loss: rank 0 records once that later attempts resume before it."""

from __future__ import annotations

import contextlib
import json

from polyreme_api.checkpoint_inventory import check_not_fenced, read_mixture
from polyreme_api.errors import PolyremeError, RolledBackError, SpikesPersistError, StepFailedError
from polyreme_api.history import START_KEY, rejection_key
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import Rejection
from polyreme_api.store import ObjectExistsError, ObjectStore
from polyreme_planner.rollback import IN_A_ROW_MAX, rejection_of, rollbacks_in_a_row
from polyreme_trainer.train.loss_health import Spike

FIELD = "spec.health.loss, or the data of that step"


class RollbackLeader:
    """Rejects what an attempt has trained around a spike.

    Args:
        store: The checkpoint root.
        attempt: The attempt of this rank.
        spec: The job's specification as the attempt began with it.
    """

    def __init__(self, store: ObjectStore, *, attempt: int, spec: TrainingJobSpec) -> None:
        self._store, self._attempt, self._spec = store, attempt, spec

    def __call__(self, spike: Spike) -> PolyremeError:
        """Record the rollback, unless too many have not helped; return the error that ends the attempt.

        Raises:
            EnvironmentFailedError: If the mixture of the attempt can't be read.
            FencedError: If a newer attempt has begun.
            StoreFailedError: If the store stays away.
        """
        record = read_mixture(self._store, self._attempt)
        if record is None:
            return StepFailedError(f"{spike}; the attempt has no record of its mixture", field=FIELD)
        window = self._spec.health.loss.window_steps
        if rollbacks_in_a_row(record, step=spike.step, window_steps=window) >= IN_A_ROW_MAX:
            return SpikesPersistError(f"{spike}, after {IN_A_ROW_MAX} rollbacks in a row, the most that are allowed")
        rejection = rejection_of(
            self._spec,
            record,
            attempt=self._attempt,
            step=spike.step,
            why=f"{spike}",
            begun_after=self._begun_after(),
        )
        if rejection is None:
            return StepFailedError(f"{spike}; no data before it can be skipped in its window of the order", field=FIELD)
        check_not_fenced(self._store, self._attempt)
        self._put(rejection)
        last = rejection.from_step + rejection.skip_steps - 1
        return RolledBackError(
            f"{spike}; the next attempt resumes before step {rejection.after_step + 1} and skips the data of steps "
            f"{rejection.from_step} to {last}"
        )

    def _put(self, rejection: Rejection) -> None:
        """Write the attempt's record: a spike may come before the first checkpoint, or twice after the same one."""
        with contextlib.suppress(ObjectExistsError):
            self._store.put_if_absent(
                rejection_key(self._attempt), rejection.model_dump_json(by_alias=True, indent=1).encode()
            )

    def _begun_after(self) -> int:
        """Return the last step of the run that this one starts from with the same data; 0 without one."""
        return int(json.loads(self._store.get(START_KEY))["step"]) if self._spec.start_from is not None else 0
