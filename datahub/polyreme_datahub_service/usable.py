"""Refuses data that nothing can be trained on, before any rank starts."""

from __future__ import annotations

from collections.abc import Iterable

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.processing import DatasetReport
from polyreme_planner.mixture import mixture_changes


def check_usable(spec: TrainingJobSpec, datasets: Iterable[DatasetReport], *, entries: int | None = None) -> None:
    """Refuse a job that gives weight to a dataset without a single good record.

    Args:
        spec: The job's specification.
        datasets: What came of its datasets.
        entries: Entries of the schedule that count; None: all. Loaders leave later ones out that can't be applied.

    Raises:
        InvalidConfigError: Naming the dataset, how many records are dead letters, and the first of them.
    """
    weighed = {source.name for source in spec.data.sources if source.weight}
    for change in mixture_changes(spec, MixtureRecord(base=tuple(spec.data.schedule[:entries]))):
        weighed |= {weight.source for weight in change.weights if weight.weight}
    trained = {source.dataset.partition("@")[0] for source in spec.data.sources if source.name in weighed}
    for dataset in datasets:
        if dataset.samples or dataset.reference.partition("@")[0] not in trained:
            continue
        dead = sum(count.dead for count in dataset.operations)
        first = next(iter(dataset.dead_letters), None)
        why = "" if first is None else f", the first is {first.sample_id}: {first.error}"
        raise InvalidConfigError(
            f"dataset {dataset.reference} has no good record: {dead:,} records are dead letters{why}",
            field="the dataset (polyreme data show lists its dead letters) or spec.data.sources",
        )
