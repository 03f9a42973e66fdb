"""Writes the record of a run, once; a record that can't be written stops no attempt."""

from __future__ import annotations

import contextlib
import importlib.metadata
import json
import sys

from polyreme_api.environment import PodEnvironment
from polyreme_api.errors import PolyremeError
from polyreme_api.job import TrainingJob, parse_job
from polyreme_api.run_record import RunRecord, record_key, recorded_spec
from polyreme_api.store import ObjectExistsError
from polyreme_datahub.objects import open_store
from polyreme_planner.plan import Plan
from polyreme_system.addresses import is_loopback, split_address


def write_run_record(
    job_json: str, plan_json: str, *, pod: PodEnvironment, objects_url: str | None, now_s: float
) -> None:
    """Write the record of a job, unless there is one.

    Args:
        job_json: The job as the leader read it.
        plan_json: Its plan.
        pod: The leader's pod, which names the checkpoint root.
        objects_url: The datahub's store; None where the job has no data of it.
        now_s: The present.
    """
    key = record_key(pod.job_uid)
    try:
        store = open_store(pod.checkpoint_url)
        if store.exists(key):
            return
        job = parse_job(json.loads(job_json))
        training = job.spec.training if "training" in job.spec.model_fields_set else None
        record = RunRecord(
            uid=pod.job_uid,
            namespace=pod.namespace,
            name=pod.job,
            cluster=_cluster(pod),
            version=importlib.metadata.version("polyreme"),
            layout=str(Plan.from_json(plan_json).layout),
            seed=None if training is None else training.seed,
            datasets=_datasets(job, pod, objects_url),
            spec=recorded_spec(job.spec),
            written_at_s=now_s,
        )
        with contextlib.suppress(ObjectExistsError):
            store.put_if_absent(key, record.model_dump_json(by_alias=True).encode())
    except (PolyremeError, OSError, ValueError) as error:
        print(f"run record is not written: {error}", file=sys.stderr)


def _cluster(pod: PodEnvironment) -> str:
    try:
        host = split_address(pod.api_url.partition("://")[2].partition("/")[0])[0]
    except ValueError:
        return pod.api_url
    return "" if is_loopback(host) else pod.api_url


def _datasets(job: TrainingJob, pod: PodEnvironment, objects_url: str | None) -> dict[str, str]:
    """Return the versions that the job's index was written for, if it is there."""
    if not objects_url or "data" not in job.spec.model_fields_set:
        return {}
    from polyreme_datahub.loader.open import read_plan

    with contextlib.suppress(PolyremeError):
        plan = read_plan(open_store(objects_url), job.spec, pod.job_uid)
        return {str(name): str(version) for name, version in plan.get("references", {}).items()}
    return {}
