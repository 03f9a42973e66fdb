"""``python -m polyreme_datahub_service.worker HOME JOB UID PARENT [seals]``: processes a job's datasets.

With ``seals`` the flows are left to workers of other processes.

Progress goes to standard output, one line of JSON at a time.
"""

from __future__ import annotations

import json
import signal
import sys
import traceback
from pathlib import Path
from typing import Any

from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.hub import process
from polyreme_datahub_service.home import DataHome
from polyreme_datahub_service.stored_job import read_stored_job
from polyreme_datahub_service.usable import check_usable
from polyreme_system.files import read_json, write_json
from polyreme_system.parent_death import end_with_parent

SEALS = "seals"


def main() -> int:
    """Process; return an exit code."""
    # What is committed stays. On other systems than Linux, the next write to the pipe ends this process.
    end_with_parent(int(sys.argv[4]), signal.SIGTERM)
    home, job_file = DataHome(path=Path(sys.argv[1])), Path(sys.argv[2])
    try:
        _process(home, job_file, uid=sys.argv[3], only_seals=sys.argv[5:] == [SEALS])
    except PolyremeError as error:
        _say({"error": str(error)})
        return int(error.exit_code)
    except OSError as error:
        _say({"error": f"{error.strerror}: {error.filename or home.path}"})
        return int(ExitCode.ENVIRONMENT)
    except Exception as error:  # noqa: BLE001 - the edge of the process: the run must hear why
        traceback.print_exc()
        _say({"error": f"{type(error).__name__}: {error}; data.log has the traceback"})
        return int(ExitCode.INTERNAL)
    return int(ExitCode.OK)


def _process(home: DataHome, job_file: Path, *, uid: str, only_seals: bool) -> None:
    job = read_stored_job(job_file)
    # Entries that were appended since the data was first processed must not refuse a job that runs.
    path, entries = job_file.with_name("data.json"), len(job.spec.data.schedule)
    entries = (read_json(path) or {}).get("scheduleEntries", entries)
    report = process(
        job.spec,
        registry_url=home.registry_url,
        objects_url=home.objects_url,
        topics_url=home.topics_url,
        job=uid,
        only_seals=only_seals,
        progress=lambda one: _say({"stage": one.operation, "done": one.done, "total": one.total}),
    )
    stages: list[dict[str, Any]] = []
    dead: list[dict[str, Any]] = []
    for dataset in report.datasets:
        stages += [
            {
                "dataset": dataset.reference,
                "stage": count.operation,
                "processed": count.misses,
                "reused": count.hits,
                "deadLetters": count.dead,
                "dropped": count.dropped,
            }
            for count in dataset.operations
        ]
        dead += [
            {
                "dataset": dataset.reference,
                "stage": letter.operation,
                "record": letter.sample_id,
                "rule": letter.rule,
                "error": letter.error,
            }
            for letter in dataset.dead_letters
        ]
    write_json(
        path,
        {
            "job": uid,
            "scheduleEntries": entries,
            "plan": report.plan,
            "seconds": report.seconds,
            **({} if report.steps is None else {"epochs": job.spec.training.epochs, "steps": report.steps}),
            "datasets": [{"dataset": each.reference, "samples": each.samples} for each in report.datasets],
            "stages": stages,
            "deadLetters": dead,
        },
    )
    check_usable(job.spec, report.datasets, entries=entries)


def _say(line: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(line) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
