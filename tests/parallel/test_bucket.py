"""One run in a bucket of a real S3 server, through everything that a checkpoint is for: killed, restarted in its pod
from memory, damaged and passed over, in another layout, and read by the command line."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from polyreme.main import invoke
from polyreme.run_files.records import read_records_at
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.objects import open_store
from polyreme_launcher.resume import fix_resume
from polyreme_launcher.shared_copies import CopyFiles
from tests.parallel.attempts import begin
from tools.s3.server import BucketServer

pytestmark = [pytest.mark.parallel, pytest.mark.services, pytest.mark.slow]


def losses(url: str) -> dict[int, float]:
    return {record.step: record.loss for record in read_records_at(url).history}


@pytest.fixture
def memory() -> Iterator[CopyFiles]:
    with contextlib.closing(CopyFiles()) as files:
        yield files


def paths_of(memory: CopyFiles, rank: int) -> list[str]:
    """A rank's two files, which have no name, by the descriptors of this process."""
    descriptors = memory.of(rank)
    assert descriptors is not None, "this machine has no memory for copies"
    return [f"/proc/{os.getpid()}/fd/{descriptor}" for descriptor in descriptors]


def test_a_run_in_a_bucket_is_that_of_a_folder_through_kills_memory_damage_and_another_layout(
    start: Any,
    bucket: str,
    bucket_server: BucketServer,
    memory: CopyFiles,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert begin(start, tmp_path / "folder", 1).wait() == [0] * 4
    undisturbed = losses((tmp_path / "folder").as_uri())
    store, environment = open_store(bucket), dict(bucket_server.environment)

    def attempt(number: int, *, layout: Any = (4, 2), **asked: Any) -> Any:
        point = fix_resume(store, attempt=number, by="one", now_s=0.0)
        assert point is not None
        copies = [paths_of(memory, rank) for rank in range(4)]
        where = {"url": bucket, "environment": environment, "copies": copies}
        return start(
            "train",
            layout=layout,
            root=tmp_path / f"logs-{number}",
            attempt=number,
            resume_from=point.resume_from,
            steps=12,
            **where,
            **asked,
        )

    assert attempt(1, faults={6: "stop"}, fault_rank=2).wait() == [75] * 4
    from_memory = attempt(2, faults={7: "kill"}, fault_rank=0)
    assert from_memory.wait()[0] == -signal.SIGKILL
    assert from_memory.logs().count("checkpoint a000001-s00000006 loaded from host memory") == 4

    # The bucket loses a bit, and the pod its memory: ranks find it, and the next leader goes back further.
    key = "a000001-s00000006/00001-000.bin"
    data = bytearray(store.get(key))
    data[-1] ^= 2
    store.put(key, bytes(data))
    memory.close()
    assert invoke(["checkpoint", "verify", bucket]) == ExitCode.REFUSED
    assert "00001-000.bin: bytes from" in capsys.readouterr().err
    assert attempt(3).wait() == [7] * 4

    last = attempt(4, layout={"dp": 2, "ep": 2})
    assert last.wait() == [0] * 2, last.logs()
    assert "damaged checkpoint ignored: a000001-s00000006: 00001-000.bin: bytes from" in last.logs()
    seen = losses(bucket)
    assert [seen[step] for step in range(1, 5)] == [undisturbed[step] for step in range(1, 5)]
    assert seen == pytest.approx(undisturbed, rel=1e-4)
    points = read_records_at(bucket).points
    assert [point.resume_from for point in points] == [None, *["a000001-s00000006"] * 2, "a000001-s00000004"]

    assert invoke(["checkpoint", "verify", bucket]) == ExitCode.OK
    capsys.readouterr()
    assert invoke(["checkpoint", "ls", bucket, "-o", "json"]) == ExitCode.OK
    shown = {row["name"]: row for row in json.loads(capsys.readouterr().out)["items"]}
    assert shown["a000004-s00000012"]["history"]
    assert not shown["a000001-s00000006"]["committed"]
    assert "expected crc32" in shown["a000001-s00000006"]["why"]
    secret = environment["AWS_SECRET_ACCESS_KEY"]
    written = [path.read_text() for path in tmp_path.rglob("rank-*.log")] + [repr(shown)]
    assert not any(secret in text for text in written)
