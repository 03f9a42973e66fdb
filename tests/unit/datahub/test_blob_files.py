"""Local copies of blobs: fetched once, checked, kept while they are mapped, removed when the folder is full."""

from __future__ import annotations

import fcntl
import mmap
import multiprocessing
import os
import threading
from pathlib import Path

import pytest

from polyreme_api.environment import CACHE_BYTES
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.store import ObjectStore
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.loader.read.blob_files import PIECE_BYTES, CopiedBlobs, blob_files
from polyreme_datahub.loader.read.copy_folder import LOCK, PARTIAL, STUCK_S, LockWaits
from polyreme_datahub.objects import open_store
from tests.unit.datahub.stores import CountingStore, StepClock

PROCESSES = 6


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(open_store(f"file://{tmp_path}/objects", sleep=lambda _: None))


def put(store: ObjectStore, data: bytes) -> str:
    digest = digest_bytes(data)
    store.put(blob_key(digest), data)
    return digest


def copies(store: ObjectStore, tmp_path: Path, bytes_max: int = 1 << 30) -> CopiedBlobs:
    return CopiedBlobs(store, tmp_path / "copies", bytes_max=bytes_max)


def test_a_blob_is_fetched_once_in_pieces_and_read_from_its_copy(store: CountingStore, tmp_path: Path) -> None:
    data = bytes(range(256)) * (PIECE_BYTES // 256) + b"end"
    digest = put(store, data)
    for _ in range(3):
        with copies(store, tmp_path).open(digest, len(data)) as file:
            assert file.read() == data
    assert (store.requests, store.bytes) == (2, len(data))
    assert [path.name for path in (tmp_path / "copies").iterdir() if path.stat().st_size] == [digest]


def read_in_process(objects: str, folder: Path, digest: str, size_bytes: int) -> None:
    with CopiedBlobs(open_store(objects), folder, bytes_max=1 << 30).open(digest, size_bytes) as file:
        assert digest_bytes(file.read()) == digest
        # As a map does for as long as a rank lives.
        threading.Event().wait(0.2)


def test_many_processes_at_once_fetch_a_blob_once(store: CountingStore, tmp_path: Path) -> None:
    data = b"x" * (2 * PIECE_BYTES)
    digest = put(store, data)
    context = multiprocessing.get_context("fork")
    arguments = (f"file://{tmp_path}/objects", tmp_path / "copies", digest, len(data))
    processes = [context.Process(target=read_in_process, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0] * PROCESSES
    assert sorted(path.name for path in (tmp_path / "copies").iterdir()) == sorted([digest, "folder.lock"])


def test_a_process_that_is_stuck_in_a_fetch_is_not_waited_for(store: CountingStore, tmp_path: Path) -> None:
    digest = put(store, b"data")
    clock = StepClock()
    files = CopiedBlobs(store, tmp_path / "copies", bytes_max=1000, waits=LockWaits(steady_s=clock, sleep=clock.sleep))
    (tmp_path / "copies").mkdir()
    with (tmp_path / "copies" / f"{digest}{LOCK}").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert files.read(digest) == b"data"
    assert STUCK_S <= clock.now_s < STUCK_S + 1
    assert not list((tmp_path / "copies").glob(f"*{PARTIAL}"))


def test_a_process_that_fetches_slowly_is_waited_for_while_it_makes_progress(
    store: CountingStore, tmp_path: Path
) -> None:
    digest = put(store, b"data")
    folder = tmp_path / "copies"
    folder.mkdir()
    lock = (folder / f"{digest}{LOCK}").open("ab")
    fcntl.flock(lock, fcntl.LOCK_EX)

    def fetch_slowly(now_s: float) -> None:
        if now_s < 5 * STUCK_S:
            (folder / f"{digest}{PARTIAL}").write_bytes(b"da")
            os.utime(folder / f"{digest}{PARTIAL}", ns=(0, 1 + int(now_s / STUCK_S * 1.5)))
        elif not lock.closed:
            (folder / f"{digest}{PARTIAL}").write_bytes(b"data")
            (folder / f"{digest}{PARTIAL}").rename(folder / digest)
            (folder / f"{digest}{LOCK}").unlink()
            lock.close()

    clock = StepClock(fetch_slowly)
    files = CopiedBlobs(store, folder, bytes_max=1000, waits=LockWaits(steady_s=clock, sleep=clock.sleep))
    assert files.read(digest) == b"data"
    assert clock.now_s >= 5 * STUCK_S
    assert store.requests == 0


def test_a_folder_whose_lock_a_stuck_process_holds_is_an_error_that_names_the_lock(
    store: CountingStore, tmp_path: Path
) -> None:
    digest = put(store, b"data")
    clock = StepClock()
    files = CopiedBlobs(store, tmp_path / "copies", bytes_max=1000, waits=LockWaits(steady_s=clock, sleep=clock.sleep))
    (tmp_path / "copies").mkdir()
    with (tmp_path / "copies" / f"folder{LOCK}").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(EnvironmentFailedError, match=f"has held .*folder{LOCK} for {STUCK_S:g} s"):
            files.open(digest, 4)


@pytest.mark.parametrize("how", ["cut", "changed", "longer"])
def test_a_copy_that_is_not_what_was_fetched_is_fetched_again(store: CountingStore, tmp_path: Path, how: str) -> None:
    data = b"0123456789" * 100
    digest = put(store, data)
    files = copies(store, tmp_path)
    assert files.read(digest) == data
    copy = tmp_path / "copies" / digest
    copy.write_bytes({"cut": data[:-1], "changed": b"!" + data[1:], "longer": data + b"!"}[how])
    assert files.read(digest) == data
    if how != "changed":
        copy.write_bytes({"cut": data[:-1], "longer": data + b"!"}[how])
        with files.open(digest, len(data)) as file:
            assert file.read() == data


def test_a_blob_that_is_damaged_or_missing_in_the_store_is_named_and_leaves_no_copy(
    store: CountingStore, tmp_path: Path
) -> None:
    digest = digest_bytes(b"right")
    files = copies(store, tmp_path)
    with pytest.raises(IndexDamagedError, match=f"{blob_key(digest)}, no such object"):
        files.read(digest)
    store.put(blob_key(digest), b"wrong")
    with pytest.raises(IndexDamagedError, match=f"{blob_key(digest)} has digest {digest_bytes(b'wrong')}"):
        files.open(digest, 5)
    store.put(blob_key(digest), b"rig")
    with pytest.raises(IndexDamagedError, match="has digest"):
        files.open(digest, 5)
    assert [path.name for path in (tmp_path / "copies").iterdir()] == ["folder.lock"]


def test_the_least_recently_used_copy_goes_and_one_that_is_mapped_stays(store: CountingStore, tmp_path: Path) -> None:
    blobs = [bytes([at]) * 400 for at in range(4)]
    digests = [put(store, blob) for blob in blobs]
    files = copies(store, tmp_path, bytes_max=1000)
    with files.open(digests[0], 400) as file:
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    for digest in digests[1:]:
        files.open(digest, 400).close()
    held = {path.name for path in (tmp_path / "copies").iterdir() if path.stat().st_size}
    assert held == {digests[0], digests[3]}
    assert mapped[:] == blobs[0]
    mapped.close()
    files.open(digests[1], 400).close()
    assert not (tmp_path / "copies" / digests[0]).exists()


def test_copies_in_use_that_leave_no_room_are_an_error_that_names_the_limit(
    store: CountingStore, tmp_path: Path
) -> None:
    one, two = put(store, b"1" * 600), put(store, b"2" * 600)
    files = copies(store, tmp_path, bytes_max=1000)
    with files.open(one, 600), pytest.raises(EnvironmentFailedError, match="1200 bytes with those in use") as failed:
        files.open(two, 600)
    assert CACHE_BYTES in str(failed.value)
    assert failed.value.exit_code is ExitCode.ENVIRONMENT


def test_what_a_killed_fetch_left_makes_room(store: CountingStore, tmp_path: Path) -> None:
    digest = put(store, b"1" * 600)
    left, fetching = (tmp_path / "copies" / f"{name}{PARTIAL}" for name in ("dead", "alive"))
    left.parent.mkdir()
    left.write_bytes(b"0" * 300)
    fetching.write_bytes(b"0" * 300)
    with fetching.open("rb") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        copies(store, tmp_path, bytes_max=1000).open(digest, 600).close()
    assert not left.exists()
    assert fetching.exists()


def test_a_limit_that_is_no_number_is_refused(tmp_path: Path) -> None:
    with pytest.raises(InvalidConfigError, match="expected a whole number of bytes"):
        blob_files("s3://bucket/prefix", {CACHE_BYTES: "ten"})
