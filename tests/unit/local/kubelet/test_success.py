"""A success that was decided is neither lost nor reported too early, whatever dies before it is on the Lease."""

import os
import signal
from pathlib import Path

import pytest

from polyreme_local.api_server.server import ApiServer
from tests.unit.local.kubelet.stack import Stack, lives

pytestmark = pytest.mark.slow


async def finish_without_api(stack: Stack) -> int:
    """Let every rank succeed while the API is away; return its port."""
    port = int(stack.server.url.rpartition(":")[2])
    await stack.server.close()
    stack.write_script("finish")
    logs = [stack.pod_directory(index) / "pod.log" for index in range(stack.replicas)]
    await stack.until(
        lambda: all(f"rank {rank} of attempt 1 ended: code 0" in log.read_text() for rank, log in enumerate(logs)),
        "every rank ended",
    )
    return port


async def bring_back(stack: Stack, port: int) -> None:
    stack.server = ApiServer(stack.cluster, tokens=stack.tokens)
    await stack.server.start(port=port)


async def test_a_success_waits_for_the_api_to_come_back(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        port = await finish_without_api(stack)
        for index in range(2):
            assert lives(stack.processes(index)["launcher"]), "no launcher ends before the Lease holds the success"
        await bring_back(stack, port)
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Succeeded", "success is on the Lease")
        for index in range(2):
            await stack.until(
                lambda index=index: stack.pod(index)["status"]["phase"] == "Succeeded",  # type: ignore[misc,index]
                f"pod {index} succeeded",
            )


async def test_a_leader_that_dies_with_its_success_unsaid_costs_one_more_attempt_that_ends(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        port = await finish_without_api(stack)
        os.kill(stack.processes(0)["launcher"], signal.SIGKILL)
        await stack.until(lambda: stack.pod(0)["status"]["phase"] == "Failed", "the pod failed")  # type: ignore[index]
        await bring_back(stack, port)
        record = stack.record()
        assert record is not None
        assert record.outcome is None, "without a record on the Lease there is no success"
        await stack.create_pod(0, replacement=1)
        await stack.attempt(2, replacements={0: 1})
        await stack.until(
            lambda: (r := stack.record()) and (r.attempt, r.outcome) == (2, "Succeeded"), "the next one succeeds"
        )


async def test_a_worker_that_dies_after_its_ranks_succeeded_takes_nothing_from_the_success(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        stack.write_script("exit=1:0")
        log = stack.pod_directory(1) / "pod.log"
        await stack.until(lambda: "rank 1 of attempt 1 ended: code 0" in log.read_text(), "rank 1 ended")
        # What the worker said before it died is on its way to the leader, in order.
        os.kill(stack.processes(1)["launcher"], signal.SIGTERM)
        await stack.until(lambda: not lives(stack.processes(1)["launcher"]), "the worker is gone")
        stack.write_script("finish")
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Succeeded", "success is on the Lease")
