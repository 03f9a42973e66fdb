"""Homes for the console: many runs of a sweep, and one run of many steps."""

from __future__ import annotations

import copy
import functools
import json
from pathlib import Path
from typing import Any

import yaml
from benchmarks.step_log.run import write as write_steps

from polyreme.run_files.paths import Home, RunDirectory
from polyreme_api.history import ResumePoint, attempt_key
from polyreme_api.job import parse_job

ROOT = Path(__file__).parents[2]
LONG = "long"
SWEPT = "failurePolicy.rules[0].onExitCodes.values"
"""The one list of a spec that holds as many numbers as a sweep has parameters."""
COMPARED = 100
"""Runs of the sweep that have steps, for a comparison."""
COMPARED_STEPS = 200
_DUMPER = getattr(yaml, "CSafeDumper", yaml.SafeDumper)


def values_of(number: int, parameters: int) -> list[int]:
    """Return the parameters of a run: every sixth differs, as in a sweep."""
    return [number >> at % 8 & 3 if at % 12 in {3, 7} else at for at in range(parameters)]


def loss_of(number: int) -> float:
    """Return the last loss of a run."""
    return 1 / (number + 1)


def write_runs(home: Path, runs: int, parameters: int) -> None:
    """Write the runs of a sweep."""
    for number in range(runs):
        run, job = Home(path=home).run("default", f"run-{number}"), _job()
        codes = {"operator": "In", "values": values_of(number, parameters)}
        job["spec"]["failurePolicy"]["rules"] = [{"name": "swept", "action": "Fail", "onExitCodes": codes}]
        state = {"state": "Succeeded", "finished": True, "step": 100, "steps": 100, "loss": loss_of(number)}
        _write_run(run, job, state)
        if number < COMPARED:
            _write_history(run, COMPARED_STEPS)


def write_long(home: Path, steps: int) -> None:
    """Write a run of so many steps, its segments closed as a run closes them."""
    run = Home(path=home).run("default", LONG)
    _write_run(run, _job(), {"state": "Succeeded", "finished": True, "step": steps, "steps": steps})
    _write_history(run, steps)


@functools.cache
def _sample() -> dict[str, Any]:
    return parse_job(yaml.safe_load((ROOT / "manifests/samples/quickstart.yaml").read_text())).to_object()


def _job() -> dict[str, Any]:
    return copy.deepcopy(_sample())


def _write_run(run: RunDirectory, job: dict[str, Any], state: dict[str, Any]) -> None:
    run.path.mkdir(parents=True)
    job["metadata"]["name"] = run.name
    run.job_file.write_text(yaml.dump(job, Dumper=_DUMPER))
    run.state_file.write_text(json.dumps(state))
    run.identity_file.write_text(json.dumps({"namespace": run.namespace, "name": run.name, "uid": run.name}))


def _write_history(run: RunDirectory, steps: int) -> None:
    point = run.checkpoints / attempt_key(1)
    point.parent.mkdir(parents=True)
    point.write_text(ResumePoint(attempt=1).model_dump_json(by_alias=True))
    write_steps(run.checkpoints, steps)
