"""What a job of a cluster leaves in a bucket, for tests of the console."""

from __future__ import annotations

from typing import Any

from polyreme_api.history import ResumePoint, attempt_key
from polyreme_api.job import parse_job
from polyreme_api.progress import StepRecord
from polyreme_api.rank_logs import RankAttempt
from polyreme_api.run_record import RunRecord, record_key, recorded_spec
from polyreme_datahub.objects import open_store
from polyreme_trainer.train.records import open_step_log

STEPS = 8


def write_run(bucket: str) -> None:
    """Leave what ranks leave: an attempt that was killed after its last step, and its last lines."""
    store = open_store(bucket)
    store.put(attempt_key(1), ResumePoint(attempt=1).model_dump_json(by_alias=True).encode())
    with open_step_log(store, None, 1, rank=0) as steps:
        for step in range(1, STEPS + 1):
            steps.write(StepRecord(attempt=1, step=step, loss=abs(step - 6) + 1.0, tokens=64, step_s=0.1))
    store.put(RankAttempt(1, 0).stored_key, b"first\nlast words <b>\n")


def status_of(bucket: str) -> dict[str, Any]:
    """Return the status of the job that left it."""
    attempt = {"number": 1, "planHash": "0" * 64, "replicas": 1, "devices": 1}
    return {"checkpointLocation": bucket, "attempt": attempt}


def write_record(location: str, job: dict[str, Any], uid: str, *, at_s: float = 1.0) -> str:
    """Leave the record of a job below the operator's checkpoint root; return the job's own root."""
    namespace, name = job["metadata"]["namespace"], job["metadata"]["name"]
    record = RunRecord(
        uid=uid,
        namespace=namespace,
        name=name,
        cluster="https://10.96.0.1:443",
        version="0.2.0",
        layout="dp2",
        datasets={"sample/digits-1": "v2<b>"},
        spec=recorded_spec(parse_job(job).spec),
        written_at_s=at_s,
    )
    root = f"{location}/{namespace}/{name}"
    open_store(root).put(record_key(uid), record.model_dump_json(by_alias=True).encode())
    return root
