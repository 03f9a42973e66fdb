"""Ranks die, launchers answer: real processes, real signals."""

import os
import signal
from pathlib import Path

import pytest

from polyreme_api.job import TrainingJobSpec
from polyreme_planner.plan import plan_for
from tests.unit.local.kubelet.stack import Stack, lives, stored

pytestmark = pytest.mark.slow


async def test_a_killed_rank_is_reported_and_the_next_attempt_runs_in_the_same_pods(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2, devices=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        before = [stack.processes(index)["launcher"] for index in range(2)]
        victim = stack.rank_pid(3, attempt=1)
        os.kill(victim, signal.SIGKILL)
        await stack.until(lambda: (r := stack.record()) and r.exits, "the exit is on the Lease")
        record = stack.record()
        assert record is not None
        assert [(exit_.rank, exit_.code, exit_.signal) for exit_ in record.exits] == [(3, None, 9)]

        await stack.attempt(2)
        await stack.until_training(2)
        assert not any(lives(stack.rank_pid(rank, attempt=1)) for rank in range(4))
        assert [stack.processes(index)["launcher"] for index in range(2)] == before

        stack.write_script("finish")
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Succeeded", "success is on the Lease")
        for index in range(2):
            await stack.until(
                lambda index=index: stack.pod(index)["status"]["phase"] == "Succeeded",  # type: ignore[misc,index]
                f"pod {index} succeeded",
            )


async def test_ranks_get_the_size_of_the_resized_gang_in_an_older_pod(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2, devices=1).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        spec = TrainingJobSpec.model_validate(stack.job["spec"])
        await stack.attempt(2, replicas=1, **stored(plan_for(spec, replicas=1)))
        log = stack.pod_directory(0) / "rank-0.a2.log"
        await stack.until(lambda: log.exists() and "lives" in log.read_text(), "the rank of attempt 2 lives")
        assert "rank 0 of 1 lives" in log.read_text()
