"""URLs of places on this machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import ObjectStore
from polyreme_api.urls import folder_path, is_bucket, is_folder
from polyreme_datahub.objects import open_store

if TYPE_CHECKING:
    from polyreme_trainer.export.stored import StoredExport
    from polyreme_trainer.weights.locations import Folder


def local_folder(url: str, *, field: str) -> Path:
    """Turn a ``file://`` URL into a path.

    Raises:
        InvalidConfigError: If it is another kind of URL.
    """
    return Path(folder_path(url, field=field))


def weights_place(url: str) -> Path | Folder:
    """Turn the location of weights into a folder of this machine, or a place in a bucket.

    Raises:
        InvalidConfigError: If it is another kind of URL.
    """
    field = "spec.model.weights.location"
    if not is_bucket(url):
        return local_folder(url, field=field)
    from polyreme_trainer.weights.locations import StoredFolder

    return StoredFolder(_store(url, field=field), url)


def export_place(url: str) -> Path | StoredExport:
    """Turn the location of an export into a folder of this machine, or a place in a bucket.

    Raises:
        InvalidConfigError: If it is another kind of URL.
    """
    field = "spec.export.location"
    if not is_bucket(url):
        return local_folder(url, field=field)
    from polyreme_trainer.export.stored import StoredExport

    return StoredExport(_store(url, field=field), url)


def _store(url: str, *, field: str) -> ObjectStore:
    try:
        return open_store(url)
    except InvalidConfigError as error:
        raise InvalidConfigError(error.message, field=field) from error


def checkpoint_folder(url: str) -> Path | None:
    """The checkpoint root as a folder, if it is one."""
    return local_folder(url, field="spec.checkpoint.location") if is_folder(url) else None
