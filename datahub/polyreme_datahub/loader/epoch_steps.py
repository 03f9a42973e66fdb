"""Steps that were counted for the epochs of a job, for those who change its end."""

from __future__ import annotations

from collections.abc import Callable

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.job.model import Training
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.loader.open import open_steps


def counted_in(objects_url: str, spec: TrainingJobSpec, *, job: str) -> Callable[[Training], Training]:
    """Return what gives a training of a job the steps that were counted for its epochs.

    It raises InvalidConfigError if none were.
    """

    def count(training: Training) -> Training:
        try:
            return open_steps(objects_url, spec.model_copy(update={"training": training}), job=job).training
        except EnvironmentFailedError as error:
            raise InvalidConfigError(error.message, field="spec.training.epochs") from error

    return count
