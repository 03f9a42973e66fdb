"""Pins the dataset versions that a job trains on, so that neither removal nor collection takes them from it."""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_datahub.registry import datasets, pins
from polyreme_datahub.registry.opening import opened_database
from polyreme_system.clock import SystemClock

HOLDERS_PAGE = 1_000


def pin_versions(registry_url: str, holder: str, references: Sequence[str]) -> None:
    """Pin versions for a job; pinning again changes nothing.

    Args:
        registry_url: The registry.
        holder: UID of the job, after the name of the controller that prepares its data, if there is one.
        references: ``name@number`` of each version.

    Raises:
        DatasetNotFoundError: If one of them was removed meanwhile.
        EnvironmentFailedError: If the registry stays away.
    """
    with opened_database(registry_url) as database:
        versions = [datasets.find_version(database, reference).id for reference in references]
        pins.pin(database, holder, versions, now_s=SystemClock().now_s())


def release_versions(registry_url: str, *holders: str) -> None:
    """Release what jobs pin.

    Raises:
        EnvironmentFailedError: If the registry stays away.
    """
    with opened_database(registry_url) as database:
        for holder in holders:
            pins.release(database, holder)


def holders(registry_url: str, prefix: str) -> list[str]:
    """Return who pins versions, of the names with a prefix.

    Raises:
        EnvironmentFailedError: If the registry stays away.
    """
    found: list[str] = []
    with opened_database(registry_url) as database:
        after = prefix
        while page := pins.holders_after(database, after, count_max=HOLDERS_PAGE):
            mine = [holder for holder in page if holder.startswith(prefix)]
            found += mine
            if len(mine) < len(page):
                break
            after = page[-1]
    return found
