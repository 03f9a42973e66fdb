"""The data plane over a bucket of a real S3 server: ranks read local copies, and get what they get from a folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme_api.environment import CACHE_DIRECTORY
from polyreme_datahub import hub, stored_data
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError, SampleDamagedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import open_token_ids
from polyreme_datahub.loader.read.part_files import PARTS
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import open_store
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = [pytest.mark.services, pytest.mark.slow]
JOB = "uid"
SPEC = make_spec(["one"], heldout=["held"], samples_max=10)


@pytest.fixture
def copies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_DIRECTORY, str(tmp_path / "copies"))
    return tmp_path / "copies"


def processed(registry: str, objects: str) -> Mapping[str, Any]:
    hub.register(registry, objects, "one", digits(1, pages=40))
    hub.register(registry, objects, "held", digits(1, pages=20, heldout=True))
    report = hub.process(SPEC, registry_url=registry, objects_url=objects, job=JOB)
    return {dataset.reference: dataset.manifest for dataset in report.datasets}


def read_all(source: PackedSource) -> list[Any]:
    batches = [source.packs(step, first=0, count=4) for step in range(1, 30)]
    return [
        np.concatenate([np.ravel(getattr(batch, name)) for batch in batches]) for name in ("tokens_T", "patches_PC")
    ]


def test_a_bucket_gives_the_manifests_and_packs_of_a_folder_through_local_copies(
    bucket: str, copies: Path, tmp_path: Path
) -> None:
    home = Home(tmp_path)
    registry = f"sqlite:///{tmp_path}/other.sqlite"
    assert processed(registry, bucket) == processed(home.registry, home.objects)
    there, here = (read_all(job_packs.open_source(url, SPEC, job=JOB)) for url in (bucket, home.objects))
    assert all(np.array_equal(one, other) for one, other in zip(there, here, strict=True))
    held = job_packs.open_evaluation(bucket, SPEC, job=JOB)
    assert held is not None
    assert len(held) == 10
    page = held.sample(0).image_digest
    assert hub.read_image(registry, bucket, page) == hub.read_image(home.registry, home.objects, page)
    assert open_token_ids(bucket, SPEC, job=JOB) == open_token_ids(home.objects, SPEC, job=JOB)
    assert len([path for path in copies.iterdir() if path.stat().st_size]) == 7


def test_a_copy_that_changes_under_a_rank_is_fetched_again_and_no_damage_is_noted(
    bucket: str, copies: Path, tmp_path: Path
) -> None:
    processed(f"sqlite:///{tmp_path}/one.sqlite", bucket)
    before = read_all(job_packs.open_source(bucket, SPEC, job=JOB))
    source = job_packs.open_source(bucket, SPEC, job=JOB)
    index = source._indexes[0]
    with (copies / f"{next(iter(index.manifest.sample_shards))}{PARTS}").open("r+b") as file:
        file.seek(600)
        file.write(b"\x07\x08\x09")
    after = read_all(source)
    assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    assert stored_data.look(bucket, SPEC, job=JOB).whole


@pytest.mark.parametrize("how", ["gone", "changed", "cut"])
def test_damage_in_the_bucket_is_noted_there_and_made_again(
    bucket: str, copies: Path, tmp_path: Path, how: str
) -> None:
    registry = f"sqlite:///{tmp_path}/one.sqlite"
    processed(registry, bucket)
    store, source = open_store(bucket), job_packs.open_source(bucket, SPEC, job=JOB)
    before = read_all(source)
    key = blob_key(source._indexes[0].manifest.shards[0].digest)
    data = store.get(key)
    match how:
        case "gone":
            store.delete(key)
        case "cut":
            store.put(key, data[:-1])
        case _:
            store.put(key, data[:-1] + bytes([data[-1] ^ 1]))
    for path in copies.iterdir():
        path.unlink()
    with pytest.raises(IndexDamagedError, match=key) as raised:
        job_packs.open_source(bucket, SPEC, job=JOB)
    assert not isinstance(raised.value, SampleDamagedError)
    seen = stored_data.look(bucket, SPEC, job=JOB)
    assert [note.error for note in seen.notes] == [raised.value.message]
    assert seen.missing == (() if how == "changed" else (key,))
    hub.process(SPEC, registry_url=registry, objects_url=bucket, job=JOB)
    assert stored_data.look(bucket, SPEC, job=JOB).whole
    again = read_all(job_packs.open_source(bucket, SPEC, job=JOB))
    assert all(np.array_equal(one, other) for one, other in zip(before, again, strict=True))
