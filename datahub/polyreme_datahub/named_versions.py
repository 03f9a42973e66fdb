"""Dataset versions by the names that jobs and people write."""

from __future__ import annotations

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.digests import digest_value
from polyreme_datahub.job_data import datasets_of
from polyreme_datahub.registry import datasets
from polyreme_datahub.registry.datasets import DatasetVersion
from polyreme_datahub.registry.engine import Database
from polyreme_datahub.sources.digits import sample_sources
from polyreme_datahub.sources.open import describe_generated


def resolve(database: Database, reference: str, *, now_s: float) -> DatasetVersion:
    """Find a dataset version; datasets under ``sample/`` register themselves.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    name = reference.partition("@")[0]
    samples = sample_sources()
    known = datasets.exists(database, name)
    if name in samples and not known:
        description, records = describe_generated(samples[name])
        datasets.add_version(
            database, name=name, source=description, digest=digest_value(description), records=records, now_s=now_s
        )
    elif not known:
        raise datasets.not_found(reference, sorted({*datasets.names(database), *samples}))
    return datasets.find_version(database, reference)


def check_spec(database: Database, spec: TrainingJobSpec) -> None:
    """Refuse datasets that do not exist.

    Raises:
        DatasetNotFoundError: Naming the nearest names there are.
    """
    samples = sample_sources()
    trained, heldout = datasets_of(spec)
    for reference in (*trained, *heldout):
        name, _, number = reference.partition("@")
        if name not in samples and not datasets.exists(database, name):
            raise datasets.not_found(reference, sorted({*datasets.names(database), *samples}))
        if number and not (name in samples and number == "1"):
            datasets.find_version(database, reference)
