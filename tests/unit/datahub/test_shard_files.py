"""Samples of a bucket are read through local copies, part by part, or from the bucket where there is no room."""

from __future__ import annotations

import errno
import fcntl
import logging
import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path

import pytest

from polyreme_api.store import ObjectStore, StoreFailedError
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index import write
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.read import part_files
from polyreme_datahub.loader.read.blob_files import CopiedBlobs
from polyreme_datahub.loader.read.copy_folder import LOCK, STUCK_S, LockWaits
from polyreme_datahub.loader.read.part_files import FETCH_THREADS, MAKE_TRIES_MAX, PARTS, ROOM_RETRY_S, PartFetches
from polyreme_datahub.loader.read.shard_files import ShardFiles
from polyreme_datahub.loader.source import STEPS_HELD
from polyreme_datahub.objects import open_store
from tests.unit.datahub.jobs import Home, digits, make_spec
from tests.unit.datahub.stores import CountingStore, StepClock

SHARD = bytes(range(256)) * 4096 + b"end"
DIGEST = digest_bytes(SHARD)
SAMPLE_BYTES = 1000
PART_BYTES = 1 << 18
PARTS_IN_SHARD = 5
PROCESSES = 4


class FailingStore(CountingStore):
    """Fails the next ``failures`` requests of ranges."""

    def __init__(self, store: ObjectStore) -> None:
        super().__init__(store)
        self.failures = 0

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        if self.failures:
            self.failures -= 1
            raise StoreFailedError("the store is away")
        return super().get_range(key, start=start, length=length)


@pytest.fixture(autouse=True)
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "PART_BYTES", PART_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> FailingStore:
    store = FailingStore(open_store(f"file://{tmp_path}/objects", sleep=lambda _: None))
    store.put(blob_key(DIGEST), SHARD)
    return store


def copies(store: ObjectStore, tmp_path: Path, bytes_max: int = 1 << 30, waits: LockWaits | None = None) -> CopiedBlobs:
    return CopiedBlobs(store, tmp_path / "copies", bytes_max=bytes_max, waits=waits)


def opened(store: ObjectStore, tmp_path: Path) -> ShardFiles:
    return ShardFiles(copies(store, tmp_path), {DIGEST: len(SHARD)})


def read(files: ShardFiles, start: int) -> bytes:
    return files.read(DIGEST, start=start, size=SAMPLE_BYTES)


def test_a_part_is_fetched_once_when_it_is_first_read(store: FailingStore, tmp_path: Path) -> None:
    files = opened(store, tmp_path)
    assert store.requests == 0
    for start, requests in (
        (0, 1),
        (5000, 1),
        (PART_BYTES - SAMPLE_BYTES, 1),
        (3 * PART_BYTES - 1, 3),
        (2 * PART_BYTES, 3),
    ):
        assert read(files, start) == SHARD[start : start + SAMPLE_BYTES]
        assert store.requests == requests
    assert files.read(DIGEST, start=len(SHARD) - 3, size=3) == b"end"
    assert (store.requests, store.bytes) == (4, 3 * PART_BYTES + 3)
    assert files.reads.fetched_bytes == store.bytes
    again = opened(store, tmp_path)
    assert read(again, 0) == SHARD[:SAMPLE_BYTES]
    assert store.requests == 4


def read_everything(objects: str, tmp_path: Path, counts: multiprocessing.Queue[tuple[int, bool]]) -> None:
    store = CountingStore(open_store(objects))
    files = opened(store, tmp_path)
    starts = range(0, len(SHARD), SAMPLE_BYTES)
    for start in starts:
        files.fetch_soon(DIGEST, start=start, size=SAMPLE_BYTES)
    right = all(read(files, start) == SHARD[start : start + SAMPLE_BYTES] for start in starts)
    counts.put((store.requests, right))


def test_processes_that_read_a_shard_at_once_fetch_each_part_once(store: FailingStore, tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    counts = context.Queue()
    arguments = (f"file://{tmp_path}/objects", tmp_path, counts)
    processes = [context.Process(target=read_everything, args=arguments) for _ in range(PROCESSES)]
    for process in processes:
        process.start()
    found = [counts.get(timeout=60) for _ in processes]
    for process in processes:
        process.join(60)
    assert all(right for _, right in found)
    assert sum(requests for requests, _ in found) == PARTS_IN_SHARD
    names = sorted(path.name for path in (tmp_path / "copies").iterdir())
    assert names == sorted([f"{DIGEST}{PARTS}", f"folder{LOCK}"])


def test_a_part_whose_fetch_was_killed_half_way_is_fetched_again(store: FailingStore, tmp_path: Path) -> None:
    assert read(opened(store, tmp_path), 0) == SHARD[:SAMPLE_BYTES]
    with (tmp_path / "copies" / f"{DIGEST}{PARTS}").open("r+b") as file:
        # Some of its bytes are here, its mark is not yet.
        file.seek(PART_BYTES)
        file.write(b"!" * 100)
    (tmp_path / "copies" / f"{DIGEST}.1{LOCK}").touch()
    assert read(opened(store, tmp_path), PART_BYTES) == SHARD[PART_BYTES : PART_BYTES + SAMPLE_BYTES]


def test_a_process_that_is_stuck_in_a_part_is_not_waited_for(store: FailingStore, tmp_path: Path) -> None:
    clock = StepClock()
    blobs = copies(store, tmp_path, waits=LockWaits(steady_s=clock, sleep=clock.sleep))
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})
    read(files, 0)
    with (tmp_path / "copies" / f"{DIGEST}.1{LOCK}").open("ab") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert read(files, PART_BYTES) == SHARD[PART_BYTES : PART_BYTES + SAMPLE_BYTES]
    assert STUCK_S <= clock.now_s < STUCK_S + 1


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("how", ["small limit", "full disk", "no folder", "no writing"])
def test_without_room_samples_are_read_from_the_store_and_one_line_is_logged(
    store: FailingStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "full disk":
        monkeypatch.setattr(os, "posix_fallocate", no_space)
    if how == "no writing":
        monkeypatch.setattr(os, "pwrite", no_space)
    if how == "no folder":
        (tmp_path / "copies").write_text("a file, so that no folder can be made here")
    blobs = copies(store, tmp_path, bytes_max=len(SHARD) - 1 if how == "small limit" else 1 << 30)
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})
    with caplog.at_level(logging.WARNING):
        for start in range(0, 5 * SAMPLE_BYTES, SAMPLE_BYTES):
            assert read(files, start) == SHARD[start : start + SAMPLE_BYTES]
    assert [
        record.message.endswith("samples are read from the store, without local copies") for record in caplog.records
    ] == [True]
    if how != "no writing":
        assert not (tmp_path / "copies" / f"{DIGEST}{PARTS}").exists()
        assert (store.requests, store.bytes) == (5, 5 * SAMPLE_BYTES)


def test_room_that_another_job_gives_back_is_used_after_a_while(
    store: FailingStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = StepClock()
    other = b"of another job"
    store.put(blob_key(digest_bytes(other)), other)
    waits = LockWaits(steady_s=clock, sleep=clock.sleep)
    files = ShardFiles(copies(store, tmp_path, len(SHARD) + PARTS_IN_SHARD, waits), {DIGEST: len(SHARD)})

    def has_copy() -> bool:
        assert read(files, 0) == SHARD[:SAMPLE_BYTES]
        return (tmp_path / "copies" / f"{DIGEST}{PARTS}").exists()

    with caplog.at_level(logging.WARNING):
        with copies(store, tmp_path).open(digest_bytes(other), len(other)):
            # More often than a file is made: looking for room is no try.
            for _ in range(MAKE_TRIES_MAX + 1):
                assert not has_copy()
                clock.now_s += ROOM_RETRY_S
        clock.now_s -= 1
        assert not has_copy()
        clock.now_s += 1
        assert has_copy()
    assert len(caplog.records) == 1


def put_two(store: ObjectStore) -> dict[str, bytes]:
    shards = {DIGEST: SHARD, digest_bytes(SHARD[::-1]): SHARD[::-1]}
    for digest, data in shards.items():
        store.put(blob_key(digest), data)
    return dict(sorted(shards.items()))


def test_of_data_that_does_not_fit_the_same_shards_have_copies(store: FailingStore, tmp_path: Path) -> None:
    shards = put_two(store)
    files = ShardFiles(copies(store, tmp_path, len(SHARD) + PARTS_IN_SHARD), dict.fromkeys(shards, len(SHARD)))
    for _ in range(10):
        for digest, data in reversed(shards.items()):
            assert files.read(digest, start=0, size=SAMPLE_BYTES) == data[:SAMPLE_BYTES]
    assert (store.requests, store.bytes) == (11, PART_BYTES + 10 * SAMPLE_BYTES)
    assert (tmp_path / "copies" / f"{next(iter(shards))}{PARTS}").exists()


def test_jobs_that_share_too_small_a_folder_do_not_fill_it_for_ever(store: FailingStore, tmp_path: Path) -> None:
    limit, shards = len(SHARD) + PARTS_IN_SHARD, put_two(store)
    jobs = [(ShardFiles(copies(store, tmp_path, limit), {digest: len(SHARD)}), digest) for digest in shards]
    for _ in range(MAKE_TRIES_MAX + 5):
        for files, digest in jobs:
            assert files.read(digest, start=0, size=SAMPLE_BYTES) == shards[digest][:SAMPLE_BYTES]
    assert store.bytes <= 2 * MAKE_TRIES_MAX * PART_BYTES + 20 * SAMPLE_BYTES


def locked(folder: Path) -> set[str]:
    """Name the copies that some process keeps."""
    kept = set()
    for path in folder.iterdir():
        with path.open("rb") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                kept.add(path.name)
    return kept


def test_only_copies_that_the_next_steps_read_are_kept_from_eviction(store: FailingStore, tmp_path: Path) -> None:
    shards = [bytes([at]) * SAMPLE_BYTES for at in range(4)]
    digests = [digest_bytes(shard) for shard in shards]
    names = [f"{digest}{PARTS}" for digest in digests]
    for digest, shard in zip(digests, shards, strict=True):
        store.put(blob_key(digest), shard)
    files = ShardFiles(copies(store, tmp_path), dict.fromkeys(digests, SAMPLE_BYTES))
    for digest, shard in zip(digests[:3], shards, strict=False):
        assert files.read(digest, start=0, size=9) == shard[:9]
    assert not locked(tmp_path / "copies")
    # The first was not read since, the last has no copy yet.
    for wanted in ([0, 3], [1, 2], []):
        files.hold(digests[at] for at in wanted)
        assert locked(tmp_path / "copies") == {names[at] for at in wanted if at < 3}
    files.hold([digests[3]])
    files.read(digests[3], start=0, size=9)
    assert locked(tmp_path / "copies") == {names[3]}


def test_a_rank_keeps_the_copies_of_the_steps_around_the_one_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES_MAX", 4 << 10)
    home = Home(tmp_path)
    home.register("one", digits(1, pages=120))
    spec = make_spec(["one"], packs_per_step=1)
    home.process(spec, "uid")
    blobs = copies(open_store(home.objects), tmp_path)
    monkeypatch.setattr("polyreme_datahub.loader.open.blob_files", lambda _, gate: blobs)
    source = job_packs.open_source(home.objects, spec, job="uid")
    (index,) = source._indexes
    for digest, size_bytes in index.manifest.sample_shards.items():
        blobs.local(digest, size_bytes, make=True)
    sample_shards = {f"{digest}{PARTS}" for digest in index.manifest.sample_shards}
    seen = set()
    for step, before in ((10, 0), (11, 1), (13, 3), (30, 0), (2, 0)):
        source.packs(step, first=0, count=1)
        near = range(step - before, step + STEPS_HELD + 1)
        samples = [slot.sample for at in near for slots in source._steps.packs(at) for slot in slots or ()]
        expected = {f"{index._range(sample)[0]}{PARTS}" for sample in samples}
        assert locked(tmp_path / "copies") & sample_shards == expected
        seen.add(frozenset(expected))
    assert len(seen) > 1
    assert all(len(expected) < len(sample_shards) for expected in seen)


@pytest.mark.parametrize("how", ["cut", "longer", "changed"])
def test_a_damaged_copy_is_replaced(store: FailingStore, tmp_path: Path, how: str) -> None:
    read(opened(store, tmp_path), 0)
    copy = tmp_path / "copies" / f"{DIGEST}{PARTS}"
    data = copy.read_bytes()
    copy.write_bytes({"cut": data[:-1], "longer": data + b"!", "changed": b"!" + data[1:]}[how])
    files = opened(store, tmp_path)
    if how == "changed":
        # The reader of a sample checks its digest, and reports what does not fit.
        assert read(files, 0) != SHARD[:SAMPLE_BYTES]
        assert files.drop(DIGEST, start=0, size=SAMPLE_BYTES)
    assert read(files, 0) == SHARD[:SAMPLE_BYTES]
    assert copy.read_bytes() == data


def test_a_fetch_that_fails_is_the_error_of_its_reader_and_is_tried_again(store: FailingStore, tmp_path: Path) -> None:
    files = opened(store, tmp_path)
    store.failures = 1
    with pytest.raises(StoreFailedError, match="the store is away"):
        read(files, 0)
    assert read(files, 0) == SHARD[:SAMPLE_BYTES]


def test_a_shard_that_is_cut_in_the_store_gives_what_is_there_and_keeps_no_part(
    store: FailingStore, tmp_path: Path
) -> None:
    files = opened(store, tmp_path)
    store.put(blob_key(DIGEST), SHARD[: PART_BYTES + SAMPLE_BYTES])
    for _ in range(2):
        assert read(files, PART_BYTES) == SHARD[PART_BYTES : PART_BYTES + SAMPLE_BYTES]
        assert read(files, 2 * PART_BYTES) == bytes(SAMPLE_BYTES)
    store.put(blob_key(DIGEST), SHARD)
    for start in (PART_BYTES, 2 * PART_BYTES):
        assert read(files, start) == SHARD[start : start + SAMPLE_BYTES]


def test_a_shard_that_is_missing_is_named_at_the_start_and_later(store: FailingStore, tmp_path: Path) -> None:
    files = opened(store, tmp_path)
    store.delete(blob_key(DIGEST))
    with pytest.raises(IndexDamagedError, match=f"{blob_key(DIGEST)}, no such object"):
        read(files, 0)
    with pytest.raises(IndexDamagedError, match=f"{blob_key(digest_bytes(b''))}, no such object"):
        ShardFiles(copies(store, tmp_path), {digest_bytes(b""): 1})


def test_all_waiters_for_a_part_get_its_fetch_or_its_error() -> None:
    fetches, gate = PartFetches(), threading.Event()
    runs: list[int] = []

    def wait_and(then: Callable[[], None]) -> Callable[[], None]:
        def fetch() -> None:
            assert gate.wait(60)
            runs.append(1)
            then()

        return fetch

    def fail() -> None:
        raise StoreFailedError("the store is away")

    good = [fetches.want(("digest", 0), wait_and(lambda: None), now=True) for _ in range(3)]
    bad = [fetches.want(("digest", 1), wait_and(fail), now=True) for _ in range(3)]
    gate.set()
    for future in good:
        assert future is not None
        future.result(60)
    for future in bad:
        assert future is not None
        assert isinstance(future.exception(60), StoreFailedError)
    assert len(runs) == 2


def test_prefetched_parts_queue_up_to_a_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(part_files, "WAITING_MAX", 5)
    fetches, gate = PartFetches(), threading.Event()
    begun = threading.Semaphore(0)

    def fetch() -> None:
        begun.release()
        assert gate.wait(60)

    running = [fetches.want(("digest", part), fetch, now=True) for part in range(FETCH_THREADS)]
    for _ in running:
        assert begun.acquire(timeout=60)
    ahead = [fetches.want(("other", part), fetch, now=False) for part in range(9)]
    assert [future is not None for future in ahead] == [True] * 5 + [False] * 4
    waited = fetches.want(("other", 8), fetch, now=True)
    gate.set()
    for future in (*running, *ahead[:5], waited):
        assert isinstance(future, Future)
        future.result(60)
