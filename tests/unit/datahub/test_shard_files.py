"""Samples of a bucket are read by ranges until the local copy of their shard is here, and if there never is one."""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import threading
from pathlib import Path

import pytest

from polyreme_api.store import ObjectStore, StoreFailedError
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index import write
from polyreme_datahub.loader.background_fetches import FETCH_TRIES_MAX, ROOM_RETRY_S
from polyreme_datahub.loader.blob_files import CopiedBlobs
from polyreme_datahub.loader.file_locks import LockWaits
from polyreme_datahub.loader.shard_files import ShardFiles
from polyreme_datahub.loader.source import STEPS_HELD
from polyreme_datahub.objects import open_store
from tests.unit.datahub.jobs import Home, digits, make_spec
from tests.unit.datahub.stores import CountingStore, StepClock

SHARD = bytes(range(256)) * 4096
DIGEST = digest_bytes(SHARD)
SAMPLE_BYTES = 1000


class GatedStore(CountingStore):
    """Holds requests of whole shards until the gate opens, and fails the first ``failures`` of them."""

    def __init__(self, store: ObjectStore, *, failures: int = 0) -> None:
        super().__init__(store)
        self.gate, self.wholes, self.failures = threading.Event(), 0, failures

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        if length > SAMPLE_BYTES:
            assert self.gate.wait(60)
            self.wholes += 1
            if self.wholes <= self.failures:
                raise StoreFailedError("the store is away")
        return super().get_range(key, start=start, length=length)


@pytest.fixture
def store(tmp_path: Path) -> GatedStore:
    store = GatedStore(open_store(f"file://{tmp_path}/objects", sleep=lambda _: None))
    store.put(blob_key(DIGEST), SHARD)
    return store


def copies(store: ObjectStore, tmp_path: Path, bytes_max: int = 1 << 30) -> CopiedBlobs:
    return CopiedBlobs(store, tmp_path / "copies", bytes_max=bytes_max)


def read(files: ShardFiles, start: int) -> bytes:
    return files.read(DIGEST, start=start, size=SAMPLE_BYTES)


def test_samples_are_read_by_ranges_while_their_shard_is_fetched_once(store: GatedStore, tmp_path: Path) -> None:
    blobs = copies(store, tmp_path)
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})
    assert (store.requests, store.bytes) == (0, 0)
    starts = [0, 5000, 70_000]
    for start in starts:
        assert read(files, start) == SHARD[start : start + SAMPLE_BYTES]
    assert (store.requests, store.bytes) == (3, 3 * SAMPLE_BYTES)
    store.gate.set()
    blobs.wait_fetched()
    for start in starts:
        assert read(files, start) == SHARD[start : start + SAMPLE_BYTES]
    assert (store.requests, store.wholes) == (4, 1)
    assert (tmp_path / "copies" / DIGEST).read_bytes() == SHARD


def no_space(*_: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("how", ["small limit", "full disk", "no folder"])
def test_without_room_samples_are_read_from_the_store_and_one_line_is_logged(
    store: GatedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    if how == "full disk":
        monkeypatch.setattr(os, "posix_fallocate", no_space)
    if how == "no folder":
        (tmp_path / "copies").write_text("a file, so that no folder can be made here")
    store.gate.set()
    blobs = copies(store, tmp_path, bytes_max=len(SHARD) - 1 if how == "small limit" else 1 << 30)
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})
    with caplog.at_level(logging.WARNING):
        for start in range(0, 5 * SAMPLE_BYTES, SAMPLE_BYTES):
            assert read(files, start) == SHARD[start : start + SAMPLE_BYTES]
            blobs.wait_fetched()
    assert [record.message.rpartition("; ")[2] for record in caplog.records] == [
        "samples are read from the store, without local copies"
    ]
    assert not (tmp_path / "copies" / DIGEST).exists()
    assert store.wholes == 0


def test_room_that_another_job_gives_back_is_used_after_a_while(
    store: GatedStore, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store.gate.set()
    clock = StepClock()
    other = b"of another job"
    store.put(blob_key(digest_bytes(other)), other)
    waits = LockWaits(steady_s=clock, sleep=clock.sleep)
    blobs = CopiedBlobs(store, tmp_path / "copies", bytes_max=len(SHARD), waits=waits)
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})

    def read_and_wait() -> bool:
        assert read(files, 0) == SHARD[:SAMPLE_BYTES]
        blobs.wait_fetched()
        return (tmp_path / "copies" / DIGEST).exists()

    with caplog.at_level(logging.WARNING):
        with copies(store, tmp_path).open(digest_bytes(other), len(other)):
            # More often than a blob is tried: looking for room is no try.
            for _ in range(FETCH_TRIES_MAX + 1):
                assert not read_and_wait()
                clock.now_s += ROOM_RETRY_S
        clock.now_s -= 1
        assert not read_and_wait()
        clock.now_s += 1
        assert read_and_wait()
    assert len(caplog.records) == 1
    assert store.wholes == 1


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


def test_only_copies_that_the_next_steps_read_are_kept_from_eviction(store: GatedStore, tmp_path: Path) -> None:
    blobs = copies(store, tmp_path)
    shards = [bytes([at]) * SAMPLE_BYTES for at in range(4)]
    digests = [digest_bytes(shard) for shard in shards]
    for digest, shard in zip(digests, shards, strict=True):
        store.put(blob_key(digest), shard)
    for digest in digests[:3]:
        blobs.open(digest, SAMPLE_BYTES).close()
    files = ShardFiles(blobs, dict.fromkeys(digests, SAMPLE_BYTES))
    for digest, shard in zip(digests[:3], shards, strict=False):
        assert files.read(digest, start=0, size=9) == shard[:9]
    assert not locked(tmp_path / "copies")
    # The first was not read since, the last has no copy yet.
    for wanted in ([digests[0], digests[3]], digests[1:3], []):
        files.hold(wanted)
        assert locked(tmp_path / "copies") == set(wanted) & set(digests[:3])
    files.hold([digests[3]])
    blobs.open(digests[3], SAMPLE_BYTES).close()
    files.read(digests[3], start=0, size=9)
    assert locked(tmp_path / "copies") == {digests[3]}


def test_a_rank_keeps_the_copies_of_the_steps_around_the_one_it_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(write, "SHARD_BYTES_MAX", 4 << 10)
    home = Home(tmp_path)
    home.register("one", digits(1, pages=120))
    spec = make_spec(["one"], packs_per_step=1)
    home.process(spec, "uid")
    blobs = copies(open_store(home.objects), tmp_path)
    monkeypatch.setattr("polyreme_datahub.loader.open.blob_files", lambda _: blobs)
    source = hub.open_source(home.objects, spec, job="uid")
    (index,) = source._indexes
    blobs.prepare(index.manifest.sample_shards)
    sample_shards = set(index.manifest.sample_shards)
    seen = set()
    for step, before in ((10, 0), (11, 1), (13, 3), (30, 0), (2, 0)):
        source.packs(step, first=0, count=1)
        near = range(step - before, step + STEPS_HELD + 1)
        samples = [slot.sample for at in near for slots in source._packs(at) for slot in slots]
        expected = {index._range(sample)[0] for sample in samples}
        assert locked(tmp_path / "copies") & sample_shards == expected
        seen.add(frozenset(expected))
    assert len(seen) > 1
    assert all(len(expected) < len(sample_shards) for expected in seen)


@pytest.mark.parametrize("how", ["cut", "changed"])
def test_a_damaged_copy_is_replaced(store: GatedStore, tmp_path: Path, how: str) -> None:
    store.gate.set()
    blobs = copies(store, tmp_path)
    read(ShardFiles(blobs, {DIGEST: len(SHARD)}), 0)
    blobs.wait_fetched()
    copy = tmp_path / "copies" / DIGEST
    copy.write_bytes(SHARD[:-1] if how == "cut" else b"!" + SHARD[1:])
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})
    if how == "changed":
        # The reader of a sample checks its digest, and reports what does not fit.
        assert read(files, 0) != SHARD[:SAMPLE_BYTES]
        assert files.fetch_again(DIGEST)
    assert read(files, 0) == SHARD[:SAMPLE_BYTES]
    blobs.wait_fetched()
    assert copy.read_bytes() == SHARD
    assert store.wholes == 2


def test_a_fetch_that_fails_is_tried_again_and_given_up_while_samples_are_read(tmp_path: Path) -> None:
    for failures, expected in ((FETCH_TRIES_MAX - 1, True), (FETCH_TRIES_MAX, False)):
        store = GatedStore(open_store(f"file://{tmp_path}/objects", sleep=lambda _: None), failures=failures)
        store.put(blob_key(DIGEST), SHARD)
        store.gate.set()
        blobs = copies(store, tmp_path / str(failures))
        files = ShardFiles(blobs, {DIGEST: len(SHARD)})
        for _ in range(FETCH_TRIES_MAX + 2):
            assert read(files, 0) == SHARD[:SAMPLE_BYTES]
            blobs.wait_fetched()
        assert (tmp_path / str(failures) / "copies" / DIGEST).exists() is expected
        assert store.wholes == FETCH_TRIES_MAX


def test_a_shard_that_is_damaged_in_the_store_is_fetched_once_and_read_by_ranges(
    store: GatedStore, tmp_path: Path
) -> None:
    store.gate.set()
    store.put(blob_key(DIGEST), SHARD[:-1] + b"!")
    blobs = copies(store, tmp_path)
    files = ShardFiles(blobs, {DIGEST: len(SHARD)})
    for _ in range(3):
        assert read(files, 0) == SHARD[:SAMPLE_BYTES]
        blobs.wait_fetched()
    assert store.wholes == 1


def test_a_shard_that_is_missing_is_named_at_the_start_and_later(store: GatedStore, tmp_path: Path) -> None:
    files = ShardFiles(copies(store, tmp_path), {DIGEST: len(SHARD)})
    store.gate.set()
    store.delete(blob_key(DIGEST))
    with pytest.raises(IndexDamagedError, match=f"{blob_key(DIGEST)}, no such object"):
        read(files, 0)
    with pytest.raises(IndexDamagedError, match=f"{blob_key(DIGEST)}, no such object"):
        ShardFiles(copies(store, tmp_path), {DIGEST: len(SHARD)})
