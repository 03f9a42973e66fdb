"""Reads a share of each step's packs, as one rank's engine does: reader.py JOB_JSON (see ``run.py``)."""

import json
import sys
import time
from pathlib import Path

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.loader import job_packs


def main() -> None:
    """Read, and print one line of JSON: the samples that were read, and when the first batch was."""
    given = json.loads(Path(sys.argv[1]).read_text())
    rank, ranks = int(sys.argv[2]), int(sys.argv[3])
    begun_s, first_batch_s = time.perf_counter(), 0.0
    source = job_packs.open_source(given["objects"], TrainingJobSpec.model_validate(given["spec"]), job=given["job"])
    found: list[str] = []
    for step in range(1, given["steps"] + 1):
        count = source.packs_in(step) // ranks
        found += source.packs(step, first=rank * count, count=count).sample_ids
        first_batch_s = first_batch_s or time.perf_counter() - begun_s
    print(json.dumps({"samples": len(found), "different": len(set(found)), "first_batch_s": first_batch_s}))


if __name__ == "__main__":
    main()
