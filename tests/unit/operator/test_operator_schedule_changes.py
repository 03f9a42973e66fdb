"""Changes of the mixture that were appended to a job and can't be applied: the job runs on without them."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_operator.types.actions import WriteStatus
from polyreme_operator.types.parse import parse_job_view
from tests.unit.operator.operator_scenes import admitted, decide, job, job_manifest, lease, node, pod, snapshot


def changed(source: str, **given: Any) -> dict[str, Any]:
    manifest = job_manifest("scheduled")
    manifest["spec"]["data"]["schedule"] = [{"fromStep": 5, "weights": [{"source": source, "weight": 1}]}]
    return {**manifest, **given}


def test_a_schedule_change_that_is_left_out_is_reported_on_a_running_job() -> None:
    runs = admitted(job("scheduled"))
    status = runs.status.model_dump(mode="json", by_alias=True, exclude_none=True)
    read = parse_job_view(changed("gone", status=status))
    assert read.spec is not None
    assert read.schedule_fault.startswith("data.schedule: fromStep 5 weighs source 'gone'")
    runs = dataclasses.replace(runs, schedule_fault=read.schedule_fault)
    pods = tuple(pod(runs, index) for index in range(2))
    seen = snapshot(runs, pods=pods, nodes={"n0": node()}, lease=lease(runs))
    (write,) = (action for action in decide(seen).actions if isinstance(action, WriteStatus))
    said = write.after.condition("ScheduleChangeIgnored")
    assert said is not None
    assert (said.status, said.reason) == ("True", "Misconfigured")
    assert said.message.startswith("this change is left out: data.schedule: fromStep 5 weighs source 'gone'")


def test_a_job_that_has_not_run_is_refused() -> None:
    read = parse_job_view(changed("gone"))
    assert read.spec is None
    assert "fromStep 5 weighs source 'gone'" in read.invalid
