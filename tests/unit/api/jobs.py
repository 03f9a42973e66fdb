"""The smallest TrainingJob, and ways to change one of its fields."""

from __future__ import annotations

import copy
from typing import Any

DROP = object()
"""Stands for: remove the field."""

SMALLEST: dict[str, Any] = {
    "apiVersion": "polyreme.dev/v1alpha1",
    "kind": "TrainingJob",
    "metadata": {"name": "small"},
    "spec": {
        "model": {"preset": "kimi-vl-nano"},
        "data": {"sequenceTokens": 64, "sources": [{"name": "one", "dataset": "sample/one"}]},
        "training": {"steps": 10, "packsPerStep": 4},
    },
}


def job_with(changes: dict[str, Any] | None = None) -> dict[str, Any]:
    """Return the smallest job with fields set by path: ``{"spec.workers.replicas": 4}``."""
    document = copy.deepcopy(SMALLEST)
    for path, value in (changes or {}).items():
        *parents, last = path.split(".")
        place: Any = document
        for name in parents:
            place = place[int(name)] if isinstance(place, list) else place.setdefault(name, {})
        if value is DROP:
            del place[last]
        elif isinstance(place, list):
            place[int(last)] = value
        else:
            place[last] = value
    return document
