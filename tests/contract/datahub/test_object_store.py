"""What every object store promises: a directory, and a bucket of a real S3 server."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.store import (
    FolderStore,
    ObjectExistsError,
    ObjectInfo,
    ObjectNotFoundError,
    ObjectStore,
    StoreFailedError,
)
from polyreme_datahub.digests import blob_key
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.local_objects import LocalObjectStore
from polyreme_datahub.objects import open_store


@pytest.fixture
def folder(tmp_path: Path) -> FolderStore:
    return open_store(f"file://{tmp_path}/objects", sleep=lambda _: None)


@pytest.fixture(params=["folder", pytest.param("bucket", marks=pytest.mark.services)])
def store(request: pytest.FixtureRequest) -> FolderStore:
    found = request.getfixturevalue(request.param)
    return open_store(found, sleep=lambda _: None) if isinstance(found, str) else found


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Paths whose bytes were synced, in order."""
    paths: list[Path] = []
    sync = os.fsync

    def note(descriptor: int) -> None:
        paths.append(Path(f"/proc/self/fd/{descriptor}").readlink())
        sync(descriptor)

    monkeypatch.setattr(os, "fsync", note)
    return paths


def test_what_was_put_is_read_whole_and_in_parts(store: ObjectStore) -> None:
    store.put("a/b", b"0123456789")
    assert store.get("a/b") == b"0123456789"
    assert store.get_range("a/b", start=3, length=4) == b"3456"
    assert store.get_range("a/b", start=8, length=40) == b"89"
    assert store.get_range("a/b", start=80, length=4) == b""
    store.put("a/b", b"new")
    assert store.get("a/b") == b"new"


def test_only_one_of_many_writers_creates_an_object(store: ObjectStore) -> None:
    won: list[int] = []

    def create(number: int) -> None:
        try:
            store.put_if_absent("one", str(number).encode())
            won.append(number)
        except ObjectExistsError:
            pass

    threads = [threading.Thread(target=create, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert store.get("one") == str(won[0]).encode()


def test_a_large_object_is_read_back_by_ranges(store: ObjectStore) -> None:
    data = bytes(range(256)) * (96 * 1024)  # 24 MiB: a bucket takes it in parts
    store.put("large", data)
    assert store.get_range("large", start=11 << 20, length=3) == data[11 << 20 : (11 << 20) + 3]
    assert store.get_range("large", start=len(data) - 5, length=99) == data[-5:]
    assert [(info.key, info.size_bytes) for info in store.list("large")] == [("large", len(data))]


@pytest.mark.services
def test_a_put_whose_answer_was_lost_meets_itself(bucket: str) -> None:
    """The server's own refusal can't say whose object is there; its content does."""
    store = open_store(bucket)
    store.put_if_absent("one", b"mine")
    store.put_if_absent("one", b"mine")
    with pytest.raises(ObjectExistsError):
        store.put_if_absent("one", b"another's")


@pytest.mark.services
def test_credentials_stand_in_no_url_and_in_no_error(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InvalidConfigError, match="an s3:// URL has credentials") as refused:
        open_store("s3://me:secret@bucket/root")
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "wrong-and-private")
    with pytest.raises(StoreFailedError) as failed:
        open_store(bucket, sleep=lambda _: None).put("a", b"1")
    assert bucket in str(failed.value)
    assert "wrong-and-private" not in str(failed.value)


@pytest.mark.parametrize("url", ["s3:///root", "s3://bucket:80/root", "s3://bucket/root?x=1", "s3://bucket/a/../b"])
def test_a_url_that_names_no_bucket_is_refused(url: str) -> None:
    with pytest.raises(InvalidConfigError):
        open_store(url)


def test_a_listing_is_sorted_and_shows_no_temporary_file(store: ObjectStore, tmp_path: Path) -> None:
    for key in ("p/b", "p/a", "q/a", "p/c/d", "pz"):
        store.put(key, b"1")
    assert [info.key for info in store.list("p/")] == ["p/a", "p/b", "p/c/d"]
    assert [info.key for info in store.list("p")] == ["p/a", "p/b", "p/c/d", "pz"]
    assert [info.size_bytes for info in store.list("q")] == [1]
    assert len(list(store.list(""))) == 5
    assert list(tmp_path.glob("objects/.tmp/*")) == []


def test_a_folder_is_looked_into_without_what_is_further_below(store: FolderStore, tmp_path: Path) -> None:
    for key in ("p/b", "p/a", "p/c/d", "p/c/e/f", "pz", "q/a"):
        store.put(key, b"12")
    assert store.children("") == (["p", "q"], [ObjectInfo(key="pz", size_bytes=2)])
    assert store.children("p") == (["c"], [ObjectInfo(key=key, size_bytes=2) for key in ("p/a", "p/b")])
    assert store.children("p/c/none") == ([], [])


def test_what_killed_writers_left_is_swept_when_it_is_old(folder: ObjectStore, tmp_path: Path) -> None:
    folder.put("a", b"1")
    left = tmp_path / "objects" / ".tmp"
    (left / "1-old").write_bytes(b"torn")
    os.utime(left / "1-old", (1.0, 1.0))
    (left / "2-new").write_bytes(b"being written")
    open_store(f"file://{tmp_path}/objects").put("b", b"1")
    assert [path.name for path in left.iterdir()] == ["2-new"]


def test_every_folder_that_a_put_made_is_synced(folder: ObjectStore, tmp_path: Path, synced: list[Path]) -> None:
    folder.put("a/b/one", b"1")
    root = tmp_path / "objects"
    assert {path for path in synced if path.is_dir()} == {root / "a/b", root / "a", root}
    synced.clear()
    folder.put("a/b/two", b"2")
    assert [path for path in synced if path.is_dir()] == [root / "a/b"]


def test_what_another_writer_put_is_durable_before_it_is_relied_on(
    folder: ObjectStore, tmp_path: Path, synced: list[Path]
) -> None:
    root = tmp_path / "objects"
    (root / "a").mkdir(parents=True)
    (root / "a" / "one").write_bytes(b"1")
    with pytest.raises(ObjectExistsError):
        folder.put_if_absent("a/one", b"1")
    assert synced == [root / "a", root]


def test_a_put_costs_two_syncs_in_a_folder_that_is_known_and_one_more_in_a_new_one(
    folder: ObjectStore, synced: list[Path]
) -> None:
    folder.put("blobs/a/one", b"1")
    synced.clear()
    folder.put("blobs/a/two", b"2")
    assert len(synced) == 2
    folder.put("blobs/b/three", b"3")
    assert len(synced) == 5


@pytest.mark.services
def test_a_range_of_a_bucket_is_one_request(bucket: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import obstore

    store = open_store(bucket)
    store.put("one", b"0123456789")
    requests: list[str] = []

    def count(name: str) -> None:
        call = getattr(obstore, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            requests.append(name)
            return call(*arguments, **named)

        monkeypatch.setattr(obstore, name, counted)

    for name in ("get", "head", "get_range", "list"):
        count(name)
    assert [store.get_range("one", start=start, length=4) for start in (2, 8, 10)] == [b"2345", b"89", b""]
    assert requests == ["get"] * 3


def test_absence_is_said_and_a_second_delete_is_no_error(store: ObjectStore) -> None:
    with pytest.raises(ObjectNotFoundError):
        store.get("none")
    assert not store.exists("none")
    store.put("some", b"")
    assert store.exists("some")
    store.delete("some")
    store.delete("some")
    assert not store.exists("some")


def test_a_folder_goes_with_its_last_object_and_comes_back(folder: ObjectStore, tmp_path: Path) -> None:
    folder.put("a/b", b"1")
    folder.put("a/c", b"1")
    folder.delete("a/b")
    assert (tmp_path / "objects" / "a").is_dir()
    folder.delete("a/c")
    assert not (tmp_path / "objects" / "a").exists()
    folder.put("a/b", b"1")
    assert folder.get("a/b") == b"1"


@pytest.mark.parametrize("key", ["", "/a", "a//b", "../a", "a/..", "."])
def test_a_key_that_leaves_the_root_is_refused(store: ObjectStore, key: str) -> None:
    with pytest.raises(InvalidConfigError, match="not an object key"):
        store.put(key, b"")


def test_a_store_away_fails_after_bounded_tries(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    waits: list[float] = []
    store = LocalObjectStore(tmp_path / "file" / "objects", sleep=waits.append)
    with pytest.raises(StoreFailedError, match="after 4 tries"):
        store.put("a", b"")
    assert waits == [0.05, 0.1, 0.2]


def test_a_torn_blob_is_written_again_and_a_damaged_one_is_refused(store: ObjectStore) -> None:
    lakehouse = Lakehouse(store)
    digest = lakehouse.put_blob(b"whole")
    store.put(blob_key(digest), b"who")
    assert lakehouse.put_blob(b"whole") == digest
    assert lakehouse.get_blob(digest) == b"whole"


def test_equal_parts_are_stored_once_and_found_by_digest(store: ObjectStore) -> None:
    lakehouse = Lakehouse(store)
    artifacts = lakehouse.put_parts([b"a", b"bc", b"a"])
    assert len(artifacts) == 2
    parts = Lakehouse(store).get_parts({artifact.digest: artifact for artifact in artifacts})
    assert sorted(parts.values()) == [b"a", b"bc"]
