"""The last lines of attempts that did not succeed are in the checkpoint root, by launchers that are real processes."""

import os
import signal
from pathlib import Path

import pytest

from polyreme_api.rank_logs import ATTEMPTS_KEPT, STORED_BYTES_MAX, STORED_LINES_MAX, RankAttempt
from polyreme_cluster.port import ObjectRef
from polyreme_datahub.objects import open_store
from polyreme_launcher.stored_logs import StoredLogs, last_lines
from tests.unit.local.kubelet.stack import Stack

pytestmark = pytest.mark.slow


def stored(root: Path) -> dict[str, str]:
    folder = root / "checkpoints" / "logs"
    return {path.relative_to(folder).as_posix(): path.read_text() for path in sorted(folder.glob("*/*"))}


def lives(attempt: int, ranks: range) -> dict[str, str]:
    return {f"a{attempt:06d}/rank-{rank:05d}.log": f"rank {rank} of 4 lives\n" for rank in ranks}


async def test_each_launcher_stores_its_ranks_lines_of_an_attempt_that_another_one_follows(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2, devices=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        os.kill(stack.rank_pid(3, attempt=1), signal.SIGKILL)
        await stack.until(lambda: (r := stack.record()) and r.exits, "the exit is on the Lease")
        await stack.attempt(2)
        await stack.until_training(2)
        await stack.until(lambda: stored(tmp_path) == lives(1, range(4)), "the lines of attempt 1 are stored")
        stack.write_script("finish")
        for index in range(2):
            await stack.until(
                lambda index=index: stack.pod(index)["status"]["phase"] == "Succeeded",  # type: ignore[misc,index]
                f"pod {index} succeeded",
            )
        assert stored(tmp_path) == lives(1, range(4)), "nothing of the attempt that succeeded"


async def test_a_pod_that_is_deleted_stores_its_lines_before_it_ends(tmp_path: Path) -> None:
    async with Stack(tmp_path, replicas=2, devices=2).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        pod = stack.pod(1)
        assert pod is not None
        await stack.cluster.delete(ObjectRef.of(pod), uid=pod["metadata"]["uid"])
        await stack.until(lambda: stack.pod(1) is None, "the pod is gone")
        assert stored(tmp_path).items() >= lives(1, range(2, 4)).items()


async def test_a_store_that_takes_nothing_fails_no_attempt_and_the_pod_says_where_the_lines_are(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "checkpoints" / "logs").write_text("a file where the folder would be")
    async with Stack(tmp_path).running() as stack:
        await stack.submit()
        await stack.until_training(1)
        os.kill(stack.rank_pid(0, attempt=1), signal.SIGKILL)
        await stack.until(lambda: (r := stack.record()) and r.exits, "the exit is on the Lease")
        await stack.attempt(2)
        await stack.until_training(2)
        log = stack.pod_directory(0) / "pod.log"
        words = f"last lines of attempt 1 are not stored, they are in {stack.pod_directory(0)}: "
        await stack.until(lambda: words in log.read_text(), "the launcher says where they are")
        stack.write_script("finish")
        await stack.until(lambda: (r := stack.record()) and r.outcome == "Succeeded", "success is on the Lease")


def test_the_newest_attempts_are_kept_and_only_the_first_worker_removes_others(tmp_path: Path) -> None:
    root, folder = tmp_path / "root", tmp_path / "pod"
    folder.mkdir()
    said: list[str] = []

    def store(attempt: int, *, removes: bool) -> None:
        (folder / RankAttempt(attempt, 7).file_name).write_text(f"attempt {attempt}\n")
        logs = StoredLogs(
            folder=folder,
            url=root.as_uri(),
            open_store=lambda: open_store(root.as_uri()),
            removes=removes,
            say=said.append,
        )
        logs.store(attempt, [7])
        logs.close(30)

    def kept() -> set[str]:
        return {path.parent.name for path in root.glob("logs/*/rank-00007.log")}

    newest = ATTEMPTS_KEPT + 2
    for attempt in range(1, newest + 1):
        store(attempt, removes=False)
    every = {f"a{attempt:06d}" for attempt in range(1, newest + 1)}
    assert kept() == every
    store(newest, removes=True)
    assert kept() == every - {"a000001", "a000002"}
    assert said[-1] == f"last lines of 1 ranks of attempt {newest} are in {root.as_uri()}/logs/"


def test_ten_thousand_lines_are_stored_and_no_more_than_four_mebibytes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"".join(b"line %d\n" % number for number in range(STORED_LINES_MAX + 5)) + b"token=hunter22")
    lines = last_lines(path).decode().splitlines()
    assert (len(lines), lines[0], lines[-1]) == (STORED_LINES_MAX, "line 6", "token=***")
    path.write_bytes((b"\xff" * 1000 + b"\n") * 5_000)
    data = last_lines(path)
    # Each of these bytes is shown as a character of three.
    assert STORED_BYTES_MAX - 3001 < len(data) <= STORED_BYTES_MAX
    assert set(data.decode()) == {"\ufffd", "\n"}
    assert last_lines(tmp_path / "none") == b""
