"""Samples in tar shards: the same samples give the same bytes, and tar, WebDataset and Parquet readers read them."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet
import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode
from polyreme_api.store import ObjectStore
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.errors import IndexDamagedError
from polyreme_datahub.index.sample_shards import SampleShards
from polyreme_datahub.index.tar_shards import SampleFiles, write_samples
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from tests.unit.datahub.stores import CountingStore

KEYS = sorted(
    ["plain", "with.dots.jpg", "folder/of/names", "../../etc/passwd", "spaces and 100%", "ünïcode/日本", "k" * 300]
    + [f"n{at:04d}" for at in range(60)],
    key=str.encode,
)
SHARD_BYTES = 40_000


def samples() -> Iterator[SampleFiles]:
    for at, key in enumerate(KEYS):
        text = json.dumps({"key": key, "at": at}).encode()
        files = {"json": text, "jpg": bytes([at]) * (700 + 31 * at), "mask.png": b"" if at % 3 else b"mask"}
        columns = {"width": at, "height": None if at % 2 else 7, "text_length": len(text), "source": f"s{at % 2}"}
        yield SampleFiles(key=key, files=files, columns=columns)


def write(store: ObjectStore) -> str:
    columns = {"width": int, "height": int, "text_length": int, "source": str}
    return write_samples(Lakehouse(store), samples(), columns=columns, shard_bytes_max=SHARD_BYTES)


@pytest.fixture
def store(tmp_path: Path) -> CountingStore:
    return CountingStore(open_store(f"file://{tmp_path}/objects"))


def test_two_writes_give_the_same_bytes(store: CountingStore, tmp_path: Path) -> None:
    other = open_store(f"file://{tmp_path}/other")
    assert write(store) == write(other)
    both = [{info.key: info.size_bytes for info in of.list("")} for of in (store, other)]
    assert both[0] == both[1]
    assert len(both[0]) == 2 * len(SampleShards(store, write(store)).shards) + 1


def test_every_sample_is_one_range_read_and_comes_back_as_it_was(store: CountingStore) -> None:
    shards = SampleShards(store, write(store))
    assert len(shards) == len(KEYS)
    assert len(shards.shards) > 2
    for at, sample in enumerate(samples()):
        store.requests = 0
        assert shards.key(at) == sample.key
        assert shards.read(at) == sample.files
        assert store.requests == 1
    store.requests = 0
    everything = dict(shards.read_many(range(len(shards))))
    assert [everything[at] for at in range(len(KEYS))] == [sample.files for sample in samples()]
    assert store.requests == len(shards.shards)
    with pytest.raises(IndexError, match="no sample 67"):
        shards.read(len(KEYS))


def test_tar_lists_a_shard_and_webdataset_groups_its_members_by_sample(store: CountingStore) -> None:
    shards = SampleShards(store, write(store))
    seen: list[dict[str, bytes]] = []
    for shard in shards.shards:
        data = store.get(blob_key(shard.digest))
        assert (len(data), digest_bytes(data)) == (shard.size_bytes, shard.digest)
        assert shard.size_bytes <= SHARD_BYTES + 1024
        groups: dict[str, dict[str, bytes]] = {}
        with tarfile.open(fileobj=io.BytesIO(data)) as archive:
            for member in archive:
                file = archive.extractfile(member)
                assert file is not None
                assert (member.mtime, member.uid, member.gid, member.mode, member.uname) == (0, 0, 0, 0o644, "")
                assert "/" not in member.name
                # WebDataset: the key ends at the first dot of the last name, the rest is the extension.
                key, _, extension = member.name.partition(".")
                groups.setdefault(key, {})[extension] = file.read()
        assert len(groups) == shard.samples
        seen += groups.values()
    assert seen == [dict(sample.files) for sample in samples()]


def test_parquet_readers_see_places_and_columns(store: CountingStore) -> None:
    digest = write(store)
    table = pyarrow.parquet.read_table(io.BytesIO(store.get(blob_key(digest))))
    assert table.column("key").to_pylist() == KEYS
    assert table.column("width").to_pylist() == list(range(len(KEYS)))
    assert table.column("height").to_pylist()[:3] == [7, None, 7]
    assert table.column("source").to_pylist()[:2] == ["s0", "s1"]
    for row in table.slice(5, 3).to_pylist():
        data = store.get_range(blob_key(row["shard"]), start=row["offset"], length=row["length"])
        assert digest_bytes(data) == row["sha256"]
    shard = SampleShards(store, digest).shards[1]
    index = pyarrow.parquet.read_table(io.BytesIO(store.get(blob_key(shard.index))))
    assert index.num_rows == 3 * shard.samples
    for row in index.slice(0, 7).to_pylist():
        data = store.get_range(blob_key(shard.digest), start=row["offset"], length=row["length"])
        assert digest_bytes(data) == row["sha256"]


def test_damaged_bytes_are_named_by_sample_and_the_others_are_read(store: CountingStore) -> None:
    shards = SampleShards(store, write(store))
    row = shards.table.slice(20, 1).to_pylist()[0]
    key = blob_key(row["shard"])
    data = bytearray(store.get(key))
    data[row["offset"] + 600] ^= 1
    store.put(key, bytes(data))
    with pytest.raises(
        IndexDamagedError, match=f"of {key} have digest .*; sample '{row['key']}' of manifest"
    ) as damaged:
        shards.read(20)
    assert damaged.value.exit_code is ExitCode.DATA_DAMAGED
    assert shards.read(21) == list(samples())[21].files
    store.delete(key)
    with pytest.raises(IndexDamagedError, match=f"stored data is missing: no object at {key}"):
        shards.read(20)
    store.delete(blob_key(shards.digest))
    with pytest.raises(IndexDamagedError, match="manifest"):
        SampleShards(store, shards.digest)


@pytest.mark.parametrize(
    ("sample", "said"),
    [
        (SampleFiles(key="", files={"jpg": b"1"}), "sample key is not valid"),
        (SampleFiles(key="k" * 513, files={"jpg": b"1"}), "expected 1 to 512 bytes"),
        (SampleFiles(key="a", files={}), "has no files"),
        (SampleFiles(key="a", files={"../x": b"1"}), "expected an extension"),
        (SampleFiles(key="a", files={"jpg": b"1"}, columns={"other": 1}), "columns that the manifest has not"),
        (SampleFiles(key="a", files={"jpg": b"1"}, columns={"width": "wide"}), "another type"),
    ],
)
def test_a_sample_that_breaks_a_rule_is_refused(store: CountingStore, sample: SampleFiles, said: str) -> None:
    with pytest.raises(InvalidConfigError, match=said):
        write_samples(Lakehouse(store), [sample])


def test_keys_that_do_not_rise_and_columns_of_the_store_are_refused(store: CountingStore) -> None:
    twice = [SampleFiles(key="a", files={"jpg": b"1"})] * 2
    with pytest.raises(InvalidConfigError, match="sample keys must rise: 'a' follows 'a'"):
        write_samples(Lakehouse(store), twice)
    with pytest.raises(InvalidConfigError, match="no such columns"):
        write_samples(Lakehouse(store), [], columns={"sha256": str})


def test_no_samples_make_an_empty_manifest(store: CountingStore) -> None:
    assert len(SampleShards(store, write_samples(Lakehouse(store), []))) == 0
