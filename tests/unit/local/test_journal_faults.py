"""The journal on a disk that refuses, in a process that is killed at any byte: nothing acknowledged is ever lost."""

import asyncio
import errno
import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import EnvironmentFailedError
from polyreme_cluster.port import ServerError
from polyreme_local.api_server import journal as journal_module
from polyreme_local.api_server.cluster import EmbeddedCluster
from polyreme_local.api_server.journal import LOCK_SUFFIX, open_store
from polyreme_local.api_server.journal_file import read_journal
from tests.contract.adapters import ManualClock, uids
from tests.contract.manifests import config, lease, ref
from tests.unit.local.test_journal import contents, look, with_store

ROOT = Path(__file__).parents[3]


def names(path: Path) -> list[str]:
    return sorted(manifest["metadata"]["name"] for manifest in read_journal(path).manifests)


@contextmanager
def file_size_limit(size_bytes: int) -> Iterator[None]:
    """Have the kernel refuse to let any file grow beyond a size, with EFBIG."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_file_that_can_not_grow_stops_every_later_write_and_stays_readable(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    failures: list[EnvironmentFailedError] = []

    async def told() -> list[str]:
        opened = open_store(
            path, clock=ManualClock(), run_token="t", new_uid=uids(), validators={}, on_failure=failures.append
        )
        acknowledged = []
        async with opened as (store, durable):
            cluster = EmbeddedCluster(store, durable=durable)
            for name in ("a", "b"):
                await cluster.create(config(name))
                acknowledged.append(name)
            # Room for a part of the next line only: what is written is torn by a real kernel.
            with file_size_limit(path.stat().st_size + 50), pytest.raises(ServerError, match="can't be written"):
                await cluster.create(config("torn"))
            with pytest.raises(ServerError):
                await cluster.create(config("after"))
            with pytest.raises(ServerError):
                await durable()
        return acknowledged

    assert asyncio.run(told()) == ["a", "b"]
    assert len(failures) == 1
    assert read_journal(path).torn_bytes == 50
    assert names(path) == ["a", "b"]
    with_store(path, look)
    assert read_journal(path).torn_bytes == 0


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error")])
@pytest.mark.parametrize("call", ["write", "fdatasync"])
def test_nothing_is_acknowledged_behind_a_failed_append(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str, error: OSError
) -> None:
    path = tmp_path / "journal"
    failures: list[EnvironmentFailedError] = []

    def refuse(*_: Any) -> None:
        raise error

    async def told() -> None:
        opened = open_store(
            path, clock=ManualClock(), run_token="t", new_uid=uids(), validators={}, on_failure=failures.append
        )
        async with opened as (store, durable):
            cluster = EmbeddedCluster(store, durable=durable)
            await cluster.create(config("before"))
            with monkeypatch.context() as patched:
                patched.setattr(os, call, refuse)
                with pytest.raises(ServerError):
                    await cluster.create(config("during"))
            # The disk works again, but whether the last batch is on it is unknown.
            with pytest.raises(ServerError):
                await cluster.create(config("after"))

    asyncio.run(told())
    assert [str(error.strerror) in str(failure) for failure in failures] == [True]
    assert "before" in names(path)
    assert "after" not in names(path)


@pytest.mark.parametrize("step", ["open", "write", "fsync", "rename", "folder"])
@pytest.mark.parametrize("killed", [False, True])
def test_a_compaction_that_fails_at_any_step_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str, killed: bool
) -> None:
    path = tmp_path / "journal"
    acknowledged: list[str] = []

    class Killed(BaseException):
        """Stands for a death of the process: no handler may make good what was half done."""

    def refuse(*_: Any, **__: Any) -> None:
        raise Killed if killed else OSError(errno.ENOSPC, "No space left on device")

    async def told() -> None:
        opened = open_store(path, clock=ManualClock(), run_token="t", new_uid=uids(), validators={})
        async with opened as (store, durable):
            cluster = EmbeddedCluster(store, durable=durable)
            created = await cluster.create(config("a"))
            for number in range(12):
                await cluster.patch(ref(created), {"data": {"x": str(number)}})
            acknowledged.append("a")
            monkeypatch.setattr(journal_module, "COMPACT_LINES_MIN", 4)
            plant(monkeypatch, step, refuse)
            with pytest.raises((ServerError, Killed)):
                await cluster.create(config("b"))
            monkeypatch.undo()

    asyncio.run(told())
    assert set(acknowledged) <= set(names(path))
    found = with_store(path, look)[0]
    assert found[0]["data"] == {"x": "11"}


def plant(monkeypatch: pytest.MonkeyPatch, step: str, refuse: Any) -> None:
    """Have one step of a compaction fail."""
    match step:
        case "open" | "fsync":
            monkeypatch.setattr(os, step, refuse)
        case "write":
            monkeypatch.setattr(journal_module, "_write_all", refuse)
        case "rename":
            monkeypatch.setattr(Path, "replace", refuse)
        case _:
            monkeypatch.setattr(journal_module, "_sync_folder", refuse)


def test_a_journal_that_is_cut_at_any_byte_of_its_last_batch_is_a_prefix_of_what_was_written(tmp_path: Path) -> None:
    path = tmp_path / "journal"

    async def story(cluster: EmbeddedCluster, _: object) -> int:
        await cluster.create(config("acknowledged"))
        size_bytes = path.stat().st_size
        await asyncio.gather(*(cluster.create(lease(f"l{i}")) for i in range(4)))
        return size_bytes

    acknowledged_bytes = with_store(path, story)
    data = path.read_bytes()
    for cut in range(acknowledged_bytes, len(data) + 1):
        path.write_bytes(data[:cut])
        kept = names(path)
        assert kept == ["acknowledged", "l0", "l1", "l2", "l3"][: len(kept)]
        assert kept


def test_the_journal_is_its_owners_only(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with_store(path, look)
    for file in (path, path.with_name(path.name + LOCK_SUFFIX)):
        assert stat.S_IMODE(file.stat().st_mode) == 0o600


KILLED = """
import asyncio, sys
from pathlib import Path
sys.path.insert(0, ".")
from polyreme_local.api_server import journal
from polyreme_local.api_server.cluster import EmbeddedCluster
from tests.contract.adapters import ManualClock, uids
from tests.contract.manifests import config, ref

journal.COMPACT_LINES_MIN = 20

async def main():
    opened = journal.open_store(Path(sys.argv[1]), clock=ManualClock(), run_token="t", new_uid=uids(), validators={})
    async with opened as (store, durable):
        cluster = EmbeddedCluster(store, durable=durable)
        created = await cluster.create(config("a"))
        for number in range(10**9):
            await cluster.patch(ref(created), {"data": {"x": str(number)}})
            print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.slow
@pytest.mark.parametrize("writes", [1, 37, 150])
def test_a_killed_process_leaves_all_that_it_acknowledged_and_its_lock_free(tmp_path: Path, writes: int) -> None:
    path = tmp_path / "journal"
    process = subprocess.Popen([sys.executable, "-c", KILLED, str(path)], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    for _ in range(writes):
        process.stdout.readline()
    os.kill(process.pid, signal.SIGKILL)
    rest = process.communicate()[0].splitlines()
    acknowledged = int(rest[-1]) if rest and rest[-1].isdigit() else writes - 1
    holder = json.loads(path.with_name(path.name + LOCK_SUFFIX).read_text())
    assert holder["pid"] == process.pid
    (found,) = with_store(path, look)[0]
    assert int(found["data"]["x"]) in {acknowledged, acknowledged + 1}


def test_what_is_left_of_a_killed_compaction_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "journal"
    (tmp_path / ".journal.tmp").write_text("half of a compaction")
    monkeypatch.setattr(journal_module, "COMPACT_LINES_MIN", 4)

    async def story(cluster: EmbeddedCluster, store: Any) -> list[Any]:
        created = await cluster.create(config("a"))
        for number in range(20):
            await cluster.patch(ref(created), {"data": {"x": str(number)}})
        return contents(store)

    before = with_store(path, story)
    assert with_store(path, look)[0] == before
