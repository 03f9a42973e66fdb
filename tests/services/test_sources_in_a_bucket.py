"""Sources in a bucket of a real S3 server: listed by pages, read with If-Match, and nothing else is ever requested."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from polyreme_api.store import ObjectStore
from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError, SourceInvalidError
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry.datasets import DatasetVersion, find_version
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.sources import bucket as buckets
from polyreme_datahub.sources.open import open_source
from polyreme_datahub.sources.types import Source
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl
from tests.unit.datahub.test_pdf_pages import document
from tests.unit.datahub.test_shards_and_tables import FORMS

pytestmark = [pytest.mark.services]
NAMES = ("a", "a b#%41+.x", "deep/er/ü", "z")


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def add(home: Home, source: str) -> tuple[DatasetVersion, Source]:
    home.register("mine", source)
    database = open_database(home.registry)
    try:
        version = find_version(database, "mine")
        return version, open_source(version.source, Lakehouse(open_store(home.objects)))
    finally:
        database.close()


def fill(store: ObjectStore) -> None:
    for at, name in enumerate(NAMES):
        store.put(f"{name}.png", picture(8, 8, seed=at))
        store.put(f"{name}.txt", f"Picture {at}.".encode())


def test_a_folder_in_a_bucket_is_a_version_of_its_objects(
    bucket: str, home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(buckets, "PAGE_KEYS", 3)
    store = open_store(bucket)
    fill(store)
    store.put("notes.md", b"no image")
    version, source = add(home, bucket + "/")
    assert (version.records, version.source["path"]) == (4, bucket)
    read = {source.read(at).sample_id: source.read(at) for at in range(4)}
    assert {name: one.blobs[0] for name, one in read.items()} == {
        f"{name}.png": picture(8, 8, seed=at) for at, name in enumerate(NAMES)
    }
    assert read["z.png"].content["conversations"][1]["content"] == "Picture 3."
    assert add(home, bucket)[0] == version
    store.put("a.png", picture(8, 8, seed=50))
    with pytest.raises(SourceInvalidError, match=r"file changed since it was registered: s3://.*/a.png, its ETag"):
        source.read(0)
    assert source.read(3).sample_id == "z.png"
    store.delete("z.png")
    with pytest.raises(SourceInvalidError, match=r"z.png, it is gone"):
        source.read(3)
    assert add(home, bucket)[0].number == 2


def test_lines_in_a_bucket_name_the_objects_beside_them(bucket: str, home: Home, tmp_path: Path) -> None:
    store = open_store(f"{bucket}/set")
    fill(store)
    open_store(bucket).put("outside.png", picture(8, 8))
    names = ["a.png", "./deep//er/ü.png", "gone.png", "http://169.254.169.254/latest", "../outside.png", "\udcff.png"]
    lines = write_jsonl(tmp_path, [record(f"{at}", [name]) for at, name in enumerate(names)], "d.jsonl").read_bytes()
    store.put("d.jsonl", lines)
    version, source = add(home, f"{bucket}/set/d.jsonl")
    assert version.records == 6
    assert [source.read(at).blobs[0] for at in (1, 0)] == [picture(8, 8, seed=2), picture(8, 8, seed=0)]
    rules = []
    for at in range(2, 6):
        with pytest.raises(BadRecordError) as bad:
            source.read(at)
        rules.append(bad.value.rule)
    assert rules == ["file", "path", "path", "path"]
    store.put("d.jsonl", lines.replace(b"What is 0", b"What is O"))
    with pytest.raises(SourceInvalidError, match=r"d.jsonl, its ETag"):
        source.read(0)


def test_a_job_trains_on_a_folder_in_a_bucket(bucket: str, home: Home) -> None:
    fill(open_store(bucket))
    home.register("mine", bucket)
    part = home.process(make_spec(["mine"])).datasets[0]
    assert (part.samples, part.dead_letters) == (4, ())


def test_pages_of_a_document_in_a_bucket_are_records(bucket: str, home: Home) -> None:
    pages = document()
    open_store(bucket).put("a.pdf", pages)
    version, source = add(home, bucket)
    assert version.records == 2
    assert source.read(1).blobs == [pages]


def test_an_empty_prefix_and_a_missing_file_are_refused(bucket: str, home: Home) -> None:
    with pytest.raises(SourceInvalidError, match="holds no image"):
        home.register("mine", bucket)
    with pytest.raises(SourceInvalidError, match="no such object"):
        home.register("mine", f"{bucket}/d.jsonl")


def test_a_large_listing_is_stored_in_a_bucket_in_parts(bucket: str, tmp_path: Path) -> None:
    data = random.Random(1).randbytes(20 * 2**20)
    path = tmp_path / "listing"
    path.write_bytes(data)
    lakehouse = Lakehouse(open_store(bucket))
    seen: list[tuple[str, int]] = []
    with path.open("rb") as file:
        assert lakehouse.put_file(file, before=lambda *blob: seen.append(blob)) == (digest_bytes(data), len(data))
    assert seen == [(digest_bytes(data), len(data))]
    assert lakehouse.get_blob(seen[0][0]) == data


@pytest.mark.parametrize("form", FORMS)
def test_shards_and_tables_in_a_bucket_are_the_version_of_a_folder_and_read_by_ranges(
    bucket: str, home: Home, tmp_path: Path, form: str
) -> None:
    folder, store = FORMS[form](tmp_path / "set"), open_store(bucket)
    files = {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.*") if path.is_file()}
    for name, data in files.items():
        store.put(name, data)
    here, local = add(home, str(folder))
    there, source = add(home, bucket)
    assert (there.digest, there.number, there.source["path"]) == (here.digest, 1, bucket)
    assert [source.read(at) for at in range(6)] == [local.read(at) for at in range(6)]
    part = home.process(make_spec(["mine"])).datasets[0]
    assert (part.samples, part.dead_letters) == (6, ())
    name = max(name for name in files if "-of-" in name)
    source = add(home, bucket)[1]
    store.put(name, files[name] + b"\0")
    with pytest.raises(SourceInvalidError, match=rf"file changed since it was registered: .*{name}"):
        source.read(5)
    assert source.read(0) == local.read(0)
    assert add(home, f"{bucket}/{min(name for name in files if '-of-' in name)}")[0].records == 3
