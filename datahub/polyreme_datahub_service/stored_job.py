"""A job that exists as a YAML file of this machine: written by the process that serves it, read by its children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.job import TrainingJob, parse_job
from polyreme_system.files import write_atomically

_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


def write_job(path: Path, job: TrainingJob) -> None:
    """Write a job as it was applied, defaults written out, atomically."""
    manifest = job.to_object()
    manifest.pop("status", None)
    write_atomically(path, yaml.safe_dump(manifest, sort_keys=False))


def read_stored_job(path: Path) -> TrainingJob:
    """Read a job that was written by ``write_job``; what only a new job is refused for does not count.

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: If it is no YAML, or no TrainingJob.
    """
    try:
        return parse_job(load_yaml(path.read_bytes()))
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}", field="the path") from error
    except yaml.YAMLError as error:
        raise InvalidConfigError(f"not YAML: {path}: {error}", field="the file") from error


def load_yaml(text: bytes) -> Any:
    """Load YAML that this project wrote: by PyYAML's loader in C where it has one, which is ten times as fast.

    Raises:
        YAMLError: If it is none.
    """
    return yaml.load(text, _LOADER)  # noqa: S506 - both loaders are safe ones
