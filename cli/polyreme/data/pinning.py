"""Pins the dataset versions that a job trains on, so that neither removal nor collection takes them from it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from polyreme_datahub.registry.engine import Database


def pin_versions(registry_url: str, uid: str, references: Sequence[str]) -> None:
    """Pin versions for a job; pinning again changes nothing.

    Args:
        registry_url: The registry.
        uid: UID of the job.
        references: ``name@number`` of each version.

    Raises:
        DatasetNotFoundError: If one of them was removed meanwhile.
        EnvironmentFailedError: If the registry stays away.
    """
    from polyreme_datahub.registry import datasets, pins

    with _opened(registry_url) as database:
        versions = [datasets.find_version(database, reference).id for reference in references]
        pins.pin(database, uid, versions, now_s=time.time())


def release_versions(registry_url: str, uid: str) -> None:
    """Release what a job pins.

    Raises:
        EnvironmentFailedError: If the registry stays away.
    """
    from polyreme_datahub.registry import pins

    with _opened(registry_url) as database:
        pins.release(database, uid)


@contextlib.contextmanager
def _opened(registry_url: str) -> Iterator[Database]:
    from polyreme_datahub.registry.engine import open_database

    database = open_database(registry_url)
    try:
        yield database
    finally:
        database.close()
