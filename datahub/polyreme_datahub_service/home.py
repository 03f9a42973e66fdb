"""The folder of this machine that holds embedded data stores, and the addresses of the servers in their place."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path
from typing import Self

from polyreme_api import environment as names
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError

HOME_VARIABLE = "POLYREME_HOME"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class DataHome:
    """Where the registry, the objects and the topics are."""

    path: Path

    @classmethod
    def locate(cls, given: Path | None = None) -> Self:
        """Find the home: the given folder, ``POLYREME_HOME``, or the user's data folder.

        Raises:
            InvalidConfigError: If the path is a file.
        """
        path = given or Path(
            os.environ.get(HOME_VARIABLE)
            or Path(os.environ.get("XDG_DATA_HOME") or Path.home() / ".local" / "share") / "polyreme"
        )
        if path.exists() and not path.is_dir():
            raise InvalidConfigError(f"home is not a folder: {path} is a file", field=HOME_VARIABLE)
        return cls(path=path.absolute())

    @property
    def registry_url(self) -> str:
        """URL of the metadata registry: the environment's, or the embedded one."""
        return os.environ.get(names.DATABASE_URL) or f"sqlite:///{self.path / 'data' / 'registry.sqlite'}"

    @property
    def objects_url(self) -> str:
        """URL of the object store: the environment's, or the embedded one."""
        return os.environ.get(names.OBJECTS_URL) or (self.path / "data" / "objects").as_uri()

    @property
    def topics_url(self) -> str:
        """URL of the topics by which workers of other processes help; empty: none do."""
        return os.environ.get(names.TOPICS_URL, "")

    @property
    def has_data(self) -> bool:
        """Whether there is a registry of datasets."""
        return bool(os.environ.get(names.DATABASE_URL)) or (self.path / "data" / "registry.sqlite").exists()

    def prepare_data(self) -> None:
        """Create the folders of the embedded data plane.

        Raises:
            EnvironmentFailedError: If the machine refuses.
        """
        objects = self.path / "data" / "objects"
        if os.environ.get(names.OBJECTS_URL):
            return
        try:
            objects.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise EnvironmentFailedError(
                f"no folder for data: {error.strerror}: {objects}", field=f"{HOME_VARIABLE}, or fix this"
            ) from error
