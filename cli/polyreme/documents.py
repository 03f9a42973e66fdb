"""Jobs as YAML files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import yaml

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJob, load_job

DOCUMENT_BYTES_MAX = 2 * 1024 * 1024


def read_job(path: Path) -> TrainingJob:
    """Read the one TrainingJob of a file (``-``: standard input) and refuse what can't run.

    Raises:
        InvalidConfigError: If the file is missing, is no YAML, holds another count of documents, or the job is refused.
    """
    return load_job(read_document(path))


def read_document(path: Path) -> Any:
    """Read the one document of a YAML file.

    Raises:
        InvalidConfigError: If the file is missing, too large, no YAML, or holds another count of documents.
    """
    try:
        text = sys.stdin.read(DOCUMENT_BYTES_MAX + 1) if str(path) == "-" else path.read_text(encoding="utf-8")
    except OSError as error:
        raise InvalidConfigError(f"can't read the job: {path}: {error.strerror}", field="the path") from error
    except UnicodeDecodeError as error:
        raise InvalidConfigError(f"can't read the job: {path} is no UTF-8 text", field="the file") from error
    if len(text) > DOCUMENT_BYTES_MAX:
        raise InvalidConfigError(f"job is too large: {path}, most {DOCUMENT_BYTES_MAX} bytes", field="the file")
    try:
        documents = [document for document in yaml.safe_load_all(text) if document is not None]
    except yaml.YAMLError as error:
        raise InvalidConfigError(f"no YAML: {path}: {' '.join(str(error).split())}", field="the file") from error
    if len(documents) != 1:
        raise InvalidConfigError(
            f"{path} holds {len(documents)} documents, rule exactly one TrainingJob", field="the file"
        )
    return documents[0]


def write_job(path: Path, job: TrainingJob) -> None:
    """Write a job as it was applied, defaults written out, atomically."""
    from polyreme.files import write_atomically

    manifest = job.to_object()
    manifest.pop("status", None)
    write_atomically(path, yaml.safe_dump(manifest, sort_keys=False))
