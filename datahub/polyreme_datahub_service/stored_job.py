"""A job that exists as a YAML file of this machine: written by the process that serves it, read by its children."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_api.job import TrainingJob, parse_job
from polyreme_system.files import write_atomically

LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast as the loader in Python, where PyYAML was built with it."""


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
        return parse_job(yaml.load(path.read_text(), LOADER))  # noqa: S506 - both loaders are safe ones
    except FileNotFoundError as error:
        raise NotFoundError(f"no such file: {path}", field="the path") from error
    except yaml.YAMLError as error:
        raise InvalidConfigError(f"not YAML: {path}: {error}", field="the file") from error
