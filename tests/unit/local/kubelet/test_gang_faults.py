"""What happens when the other processes of a pod die, hang or lie: real processes, real signals."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from polyreme_api import labels
from polyreme_api.ownership import is_marked
from polyreme_api.progress import ProgressRecord
from polyreme_api.signed_progress import ProgressSigner
from polyreme_cluster.port import ObjectRef
from polyreme_launcher.peers import FollowerLink
from polyreme_launcher.protocol.handshake import FollowerIdentity
from polyreme_system.clock import SystemClock
from tests.unit.local.kubelet.stack import ROOT, Stack, lives

pytestmark = pytest.mark.slow


async def test_a_killed_fork_server_takes_its_ranks_and_is_replaced(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2, devices=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        ranks = [stack.rank_pid(rank, attempt=1) for rank in (2, 3)]
        os.kill(stack.processes(1)["fork_server"], signal.SIGKILL)
        await stack.until(lambda: (r := stack.record()) and len(r.exits) == 2, "both exits are on the Lease")
        assert not any(map(lives, ranks))
        await stack.attempt(2)
        await stack.until_training(2)


async def test_a_killed_launcher_takes_its_ranks_and_fails_its_pod(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2, devices=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        ranks = [stack.rank_pid(rank, attempt=1) for rank in (2, 3)]
        os.kill(stack.processes(1)["launcher"], signal.SIGKILL)
        await stack.until(lambda: stack.pod(1)["status"]["phase"] == "Failed", "the pod failed")  # type: ignore[index]
        await stack.until(lambda: not any(map(lives, ranks)), "the ranks died too")
        failed = stack.pod(1)
        assert failed is not None
        assert failed["status"]["containerStatuses"][0]["state"]["terminated"]["exitCode"] == 137

        await stack.create_pod(1, replacement=1)
        await stack.attempt(2, replacements={1: 1})
        born = stack.pod_directory(1, 1) / "born-2.a2"
        await stack.until(born.exists, "the replacement runs the next attempt")


async def test_a_replaced_leader_takes_over_at_the_same_address(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        survivor = stack.processes(1)["launcher"]
        os.kill(stack.processes(0)["launcher"], signal.SIGKILL)
        await stack.until(lambda: stack.pod(0)["status"]["phase"] == "Failed", "the pod failed")  # type: ignore[index]
        await stack.create_pod(0, replacement=1)
        await stack.attempt(2, replacements={0: 1})
        born = stack.pod_directory(1) / "born-1.a2"
        await stack.until(born.exists, "the survivor's rank runs the next attempt")
        assert stack.processes(1)["launcher"] == survivor
        await stack.until(lambda: (r := stack.record()) and (r.attempt, r.replacement) == (2, 1), "the Lease is its")


async def test_a_record_that_another_account_wrote_stops_no_leader(tmp_path: Path) -> None:
    """Records of later attempts and leaders fence a leader, if a leader of the job has signed them."""
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        launcher, signer = stack.processes(0)["launcher"], ProgressSigner(b"another key", stack.uid)
        later = ProgressRecord(attempt=9, replacement=9, released=True, sequence=1_000_000)
        forged = signer.annotations(later, at_s=0.0)
        for annotations in (forged, {**forged, labels.ANNOTATION_SIGNATURE: None}):
            stack.store.change(stack.lease, {"metadata": {"annotations": annotations}})
            await stack.until(lambda: (r := stack.record()) and r.attempt == 1, "the leader writes its own again")
        assert lives(launcher)
        stack.store.change(stack.lease, {"metadata": {"ownerReferences": None, "labels": None}})
        await stack.until(
            lambda: is_marked(stack.store.get(stack.lease)["metadata"], stack.uid),
            "the Lease has its owner and its labels again",
        )
        stack.write_script("finish")
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Succeeded", "it trains to its end")


async def test_a_stopped_rank_of_an_old_attempt_never_wakes(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        sleeper = stack.rank_pid(1, attempt=1)
        os.kill(sleeper, signal.SIGSTOP)
        await stack.attempt(2)
        await stack.until_training(2)
        assert not lives(sleeper)


async def test_a_fork_server_that_hangs_does_not_keep_old_ranks_alive(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        old = stack.rank_pid(1, attempt=1)
        os.kill(stack.processes(1)["fork_server"], signal.SIGSTOP)
        await stack.attempt(2)
        await stack.until_training(2)
        assert not lives(old)


async def test_a_deleted_pod_ends_within_its_grace_and_its_object_goes(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        pids = [stack.processes(0)["launcher"], stack.rank_pid(0, attempt=1), stack.rank_pid(1, attempt=1)]
        job = stack.store.get(stack_ref(stack))
        await stack.cluster.delete(stack_ref(stack), uid=job["metadata"]["uid"])
        await stack.until(lambda: stack.pod(0) is None and stack.pod(1) is None, "both pods are gone")
        assert not any(map(lives, pids))


async def test_a_stop_with_a_checkpoint_lets_the_ranks_end_themselves(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        await stack.attempt(1, desired="Stop", checkpointRequested=True)
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Stopped", "the stop is on the Lease")
        log = (stack.pod_directory(0) / "pod.log").read_text()
        assert "rank 0 of attempt 1 ended: code 75" in log


async def test_ranks_that_end_without_a_last_record_have_not_succeeded(tmp_path: Path) -> None:
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        stack.write_script("silent")
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Failed", "the failure is on the Lease")


async def test_a_stranger_without_the_secret_never_hears_the_leader(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        heard: list[str] = []
        (port,) = {listener.getsockname()[1] for listener in stack.leaders._sockets.values()}
        link = FollowerLink(
            address=f"127.0.0.1:{port}",
            identity=FollowerIdentity(job_uid=stack.uid, index=1, replacement=9, secret=b"guessed"),
            clock=SystemClock(),
            on_connected=lambda: heard.append("connected"),
            on_lost=lambda: heard.append("lost"),
            on_message=lambda message: heard.append(str(message)),
        )
        assert not await link._connect()
        assert heard == []
        assert lives(stack.rank_pid(1, attempt=1))


async def test_everything_listens_on_loopback_only(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        pods = [stack.processes(index) for index in range(2)]
        pids = {os.getpid(), *(pod[name] for pod in pods for name in ("launcher", "fork_server"))}
        pids |= {stack.rank_pid(rank, attempt=1) for rank in range(2)}
        inodes = {inode for pid in pids for inode in socket_inodes(pid)}
        listening = [address for address, inode in listening_sockets() if inode in inodes]
        assert len(listening) >= 3, "API server, leader, rendezvous"
        assert all(address.startswith("0100007F:") for address in listening), listening


async def test_files_with_secrets_are_their_owners_only(tmp_path: Path) -> None:
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        for name in ("secret", "token"):
            assert (stack.pod_directory(0) / name).stat().st_mode & 0o777 == 0o600


def test_a_killed_host_leaves_nothing_running(tmp_path: Path) -> None:
    # PYTHONSAFEPATH takes the working folder off the path.
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    host = subprocess.Popen([sys.executable, "-m", "tests.unit.local.kubelet.stack", str(tmp_path)], cwd=ROOT, env=path)
    try:
        told = tmp_path / "pids.json"
        wait_until(told.exists, host)
        pids = json.loads(told.read_text())["pids"]
        assert len(pids) == 8
        assert all(map(lives, pids))
    finally:
        host.kill()
        host.wait()
    asyncio.run(asyncio.wait_for(gone(pids), 10))


def wait_until(holds: Callable[[], bool], host: subprocess.Popen[bytes]) -> None:
    async def wait() -> None:
        async with asyncio.timeout(60):
            while not holds():
                assert host.poll() is None
                await asyncio.sleep(0.01)

    asyncio.run(wait())


async def gone(pids: list[int]) -> None:
    while any(map(lives, pids)):
        await asyncio.sleep(0.005)


def stack_ref(stack: Stack) -> ObjectRef:
    return ObjectRef(kind="TrainingJob", namespace="default", name="toy")


def socket_inodes(pid: int) -> set[str]:
    targets = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        try:
            target = str(entry.readlink())
        except OSError:
            continue
        if target.startswith("socket:["):
            targets.add(target[8:-1])
    return targets


def listening_sockets() -> list[tuple[str, str]]:
    """Local address and inode of every socket that listens, from the kernel's tables."""
    found = []
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A":
                found.append((fields[1], fields[9]))
    return found
