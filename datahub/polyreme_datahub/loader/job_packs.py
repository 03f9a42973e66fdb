"""A processed job's packs, for a process that reads them; light enough for a forked rank."""

from __future__ import annotations

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.loader.evaluation import HeldOutSource
from polyreme_datahub.loader.open import open_held_out, open_packs, sleep_really
from polyreme_datahub.loader.read.origin_budget import origin_budget
from polyreme_datahub.loader.source import PackedSource


def open_source(
    objects_url: str,
    spec: TrainingJobSpec,
    *,
    job: str = "",
    wait_s: float | None = None,
    mixture: MixtureRecord | None = None,
) -> PackedSource:
    """Open the training data of a processed job; light enough for a forked rank.

    Args:
        objects_url: As in ``register``.
        spec: The job's spec.
        job: As in ``process``.
        wait_s: How long to wait for the data [s]; None: ``spec.data.wait_seconds``.
        mixture: Changes of the mixture, as an attempt's resume point has them; None: all of ``spec.data.schedule``,
            each at its step.

    Raises:
        EnvironmentFailedError: If the data is not processed in time, or its index is damaged.
    """
    limit_s = float(spec.data.wait_seconds) if wait_s is None else wait_s
    gate = origin_budget(objects_url, spec, job=job)
    return open_packs(objects_url, spec, job=job, wait_s=limit_s, sleep=sleep_really, gate=gate, mixture=mixture)


def open_evaluation(
    objects_url: str, spec: TrainingJobSpec, *, job: str = "", wait_s: float | None = None
) -> HeldOutSource | None:
    """Open the held-out data of a processed job, if it names any; arguments and errors as ``open_source``."""
    limit_s = float(spec.data.wait_seconds) if wait_s is None else wait_s
    gate = origin_budget(objects_url, spec, job=job)
    return open_held_out(objects_url, spec, job=job, wait_s=limit_s, sleep=sleep_really, gate=gate)
