"""Variables by which the processes of a run reach its stores, passed by their environment and never in a pod."""

from __future__ import annotations

import os

from polyreme.run_files.paths import Home
from polyreme_api.environment import CACHE_BYTES, CACHE_DIRECTORY, DATA_ENGINE, DATA_ENGINE_BYTES, DATA_THREADS

BUCKET_VARIABLES = "AWS_"
"""Beginning of the variables by which a process finds a bucket's server and may use it."""


def store_variables(home: Home) -> dict[str, str]:
    """Return what opens buckets, where local copies lie, and who reads them: what is in a pod is in the journal."""
    given = {name: value for name, value in os.environ.items() if name.startswith(BUCKET_VARIABLES)}
    chosen = {
        name: os.environ[name]
        for name in (CACHE_BYTES, DATA_ENGINE, DATA_ENGINE_BYTES, DATA_THREADS)
        if name in os.environ
    }
    return {**given, **chosen, CACHE_DIRECTORY: str(home.cache)}
