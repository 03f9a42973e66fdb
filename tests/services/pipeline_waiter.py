"""Processes a job's data on the servers that the environment names, and prints what came of it as one line of JSON.

``python -m tests.services.pipeline_waiter DATASET WORKERS``.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from polyreme_api.environment import DATABASE_URL, OBJECTS_URL, TOPICS_URL
from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub import hub
from polyreme_datahub.processing import ProcessReport
from tests.unit.datahub.jobs import make_spec

AWAY = 7


def facts(report: ProcessReport) -> dict[str, Any]:
    """Return what two runs over the same data must agree on."""
    (part,) = report.datasets
    letters = sorted([letter.sample_id, letter.operation, letter.rule] for letter in part.dead_letters)
    return {"samples": part.samples, "tokens": part.tokens, "manifest": part.manifest, "letters": letters}


def main(dataset: str, workers: int) -> int:
    """Process; 7 when a server stays away."""
    try:
        report = hub.process(
            make_spec([dataset], sequence_tokens=128),
            registry_url=os.environ[DATABASE_URL],
            objects_url=os.environ[OBJECTS_URL],
            topics_url=os.environ.get(TOPICS_URL, ""),
            workers=workers,
        )
    except EnvironmentFailedError as error:
        sys.stderr.write(f"{error}\n")
        return AWAY
    made = {count.operation: count.misses for count in report.operations}
    sys.stdout.write(json.dumps({**facts(report), "made": made}) + "\n")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1], int(sys.argv[2])))
