"""Pods that can't start, that are deleted before they do, that leave processes; launchers that restart often."""

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.rank_logs import RankAttempt
from polyreme_cluster.port import Manifest, ObjectRef
from polyreme_local.kubelet.process import RECORD_FILE, start_process
from tests.unit.local.kubelet.stack import Stack, lives

pytestmark = pytest.mark.slow

RESTARTS = 50


def bare_pod(name: str, **spec: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {"nodeName": "here", "containers": [{"name": "main", "command": ["true"]}], **spec},
    }


def phase(stack: Stack, name: str) -> Manifest | None:
    found = [record.manifest for record in stack.store.records("Pod") if record.name == name]
    return found[0]["status"] if found else None


@pytest.mark.parametrize("command", [["/no/such/program"], [], ["a\0b"]])
async def test_a_command_that_can_not_run_fails_its_pod_and_says_why(tmp_path: Path, command: list[str]) -> None:
    async with Stack(tmp_path).running() as stack:
        await stack.cluster.create(bare_pod("odd", containers=[{"name": "main", "command": command}]))
        await stack.until(lambda: (phase(stack, "odd") or {}).get("phase") == "Failed", "the pod failed")
        status = phase(stack, "odd")
        assert status is not None
        assert status["reason"] == "StartError"
        assert status["containerStatuses"][0]["state"]["terminated"]["message"]


async def test_a_failed_pod_reports_the_last_line_of_its_log(tmp_path: Path) -> None:
    async with Stack(tmp_path).running() as stack:
        command = ["sh", "-c", "echo first; echo 'disk is full' >&2; echo; exit 7"]
        await stack.cluster.create(bare_pod("odd", containers=[{"name": "main", "command": command}]))
        await stack.until(lambda: (phase(stack, "odd") or {}).get("phase") == "Failed", "the pod failed")
        status = phase(stack, "odd")
        assert status is not None
        terminated = status["containerStatuses"][0]["state"]["terminated"]
        assert (terminated["exitCode"], terminated["message"]) == (7, "disk is full")


async def test_a_pod_that_waits_for_its_secret_can_be_deleted(tmp_path: Path) -> None:
    async with Stack(tmp_path).running() as stack:
        volumes = [{"name": "v", "secret": {"secretName": "never"}}]
        pod = await stack.cluster.create(bare_pod("waits", volumes=volumes))
        ref = ObjectRef.of(pod)
        await stack.until(lambda: pod["metadata"]["uid"] in stack.kubelet._work, "the kubelet has it")
        await stack.cluster.delete(ref, uid=pod["metadata"]["uid"])
        await stack.until(lambda: phase(stack, "waits") is None, "the object is gone")
        assert not (stack.kubelet.pod_directory("waits") / RECORD_FILE).exists(), "nothing was started"


def test_a_process_that_can_not_be_recorded_does_not_run_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from polyreme_local.kubelet import process as module

    real, writes = module.write_durably, []

    def full_the_second_time(path: Path, data: bytes, *, mode: int = 0o600) -> None:
        writes.append(path)
        if len(writes) == 2:
            raise OSError(28, "No space left on device")
        real(path, data, mode=mode)

    monkeypatch.setattr(module, "write_durably", full_the_second_time)
    with pytest.raises(OSError, match="No space"):
        start_process(
            ["sleep", "1000"],
            environment={"PATH": os.environ["PATH"]},
            directory=tmp_path,
            uid="u",
            token=f"token of {tmp_path}",
            descriptors=[],
        )
    assert module.end_strays("u", f"token of {tmp_path}") == []


async def test_what_a_rank_started_outside_its_group_is_dead_before_the_pod_has_ended(tmp_path: Path) -> None:
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        stack.write_script("stray=0")
        told = stack.pod_directory(0) / "stray"
        await stack.until(lambda: told.exists() and told.read_text(), "the stray lives")
        stray, rank = int(told.read_text()), stack.rank_pid(0, attempt=1)
        os.kill(stack.processes(0)["launcher"], signal.SIGKILL)
        await stack.until(lambda: stack.pod(0)["status"]["phase"] == "Failed", "the pod failed")  # type: ignore[index]
        assert not lives(rank)
        assert not lives(stray)


async def test_fifty_restarts_in_place_leak_no_descriptor_and_leave_no_zombie(tmp_path: Path) -> None:
    async with Stack(tmp_path, devices=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        await next_attempt(stack, 2)
        pids = [stack.processes(0)["launcher"], stack.processes(0)["fork_server"]]
        # The launcher opens the file of a rank when that writes its first line.
        logs = [stack.pod_directory(0) / RankAttempt(2, rank).file_name for rank in range(2)]
        await stack.until(lambda: all(log.exists() for log in logs), "both ranks have written")
        # It opens files also to store the last lines of the attempt before, and folders to remove older ones.
        said = stack.pod_directory(0) / "pod.log"
        await stack.until(lambda: "ranks of attempt 1 are in" in said.read_text(), "the last lines are stored")
        await stack.until(lambda: not any("/logs" in of for of in opened(pids[0])), "older ones are removed")
        before = [descriptors(pid) for pid in pids]
        for number in range(3, 3 + RESTARTS):
            await next_attempt(stack, number)
        assert [stack.processes(0)["launcher"], stack.processes(0)["fork_server"]] == pids
        await stack.until(lambda: [descriptors(pid) for pid in pids] == before, "no descriptor is left open")
        assert zombies(set(pids)) == []


async def next_attempt(stack: Stack, number: int) -> None:
    await stack.attempt(number)
    await stack.until_training(number)


def descriptors(pid: int) -> int:
    return len(list(Path(f"/proc/{pid}/fd").iterdir()))


def opened(pid: int) -> list[str]:
    links = []
    for path in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            links.append(str(path.readlink()))
    return links


def zombies(parents: set[int]) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = path.read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if fields[0] == "Z" and int(fields[1]) in parents:
            found.append(path.parent.name)
    return found
