"""Bytes that change on disk are found where they are read, stop the rank, and are restored by the next processing."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from polyreme_api.batch import PackedBatch
from polyreme_api.exit_codes import ExitCode
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub import hub, stored_data
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import IndexDamagedError, SampleDamagedError
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.sample.mapped_index import MappedIndex
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import store_folder
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow
JOB = "uid"


@pytest.fixture(scope="module")
def processed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = Home(tmp_path_factory.mktemp("processed"))
    home.register("one", digits(1, pages=40))
    home.register("held", digits(1, pages=20, heldout=True))
    home.process(spec(), job=JOB)
    return home.folder


@pytest.fixture
def home(processed: Path, tmp_path: Path) -> Home:
    """What was processed once, in a folder that a test may damage."""
    return Home(shutil.copytree(processed, tmp_path / "home"))


def spec() -> TrainingJobSpec:
    return make_spec(["one"], heldout=["held"], samples_max=10)


def packs(home: Home) -> list[PackedBatch]:
    source = job_packs.open_source(home.objects, spec(), job=JOB)
    return [source.packs(step, first=0, count=4) for step in (1, 2, 3)]


def read_all(source: PackedSource) -> None:
    """Read every sample once or more."""
    for step in range(1, 30):
        source.packs(step, first=0, count=4)


def open_and_read_all(home: Home) -> None:
    read_all(job_packs.open_source(home.objects, spec(), job=JOB))
    job_packs.open_evaluation(home.objects, spec(), job=JOB)


def same(some: list[PackedBatch], others: list[PackedBatch]) -> bool:
    names = ("tokens_T", "targets_T", "patches_PC", "grids_I2")
    return all(
        np.array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name)))
        for one, other in zip(some, others, strict=True)
        for name in names
    )


def flip(path: Path, at: int) -> None:
    """Flip the bits of a byte, in the file as it lies: processes that have mapped it see it."""
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 255]))


def spoil(home: Home, index: MappedIndex, array: str, at: int) -> None:
    shard = index.manifest.shards[0]
    place = next(place for place in shard.arrays if place.name == array)
    flip(store_folder(home.objects) / blob_key(shard.digest), place.start + at)


def spoil_sample(home: Home, index: MappedIndex, at: int) -> None:
    flip(store_folder(home.objects) / blob_key(next(iter(index.manifest.sample_shards))), at)


@pytest.mark.parametrize("at", [3, 600], ids=["name", "record"])
def test_a_sample_that_is_damaged_while_a_rank_trains_stops_it_and_is_made_again(home: Home, at: int) -> None:
    before = packs(home)
    source = job_packs.open_source(home.objects, spec(), job=JOB)
    spoil_sample(home, source._indexes[0], at)
    told = r"sample digits-1t-\S+ of one@1 in blobs/sha256/\S+ has digest"
    with pytest.raises(SampleDamagedError, match=told) as raised:
        read_all(source)
    assert raised.value.exit_code is ExitCode.DATA_DAMAGED
    seen = stored_data.look(home.objects, spec(), job=JOB)
    assert [note.error for note in seen.notes] == [raised.value.message]
    assert not seen.whole
    assert len(hub.show_dataset(home.registry, home.objects, "one").tombstones) == 1

    home.process(spec(), job=JOB)
    assert stored_data.look(home.objects, spec(), job=JOB).whole
    assert hub.show_dataset(home.registry, home.objects, "one").tombstones == ()
    assert same(packs(home), before)


@pytest.mark.parametrize("array", ["token_counts", "grids_I2", "starts", "digests", "ids"])
def test_what_was_checked_when_an_index_was_opened_can_not_change_under_a_rank(home: Home, array: str) -> None:
    before = packs(home)
    source = job_packs.open_source(home.objects, spec(), job=JOB)
    spoil(home, source._indexes[0], array, 8)
    assert same([source.packs(step, first=0, count=4) for step in (1, 2, 3)], before)


def test_held_out_data_that_is_damaged_later_stops_the_rank_and_details_stay(home: Home) -> None:
    held = job_packs.open_evaluation(home.objects, spec(), job=JOB)
    assert held is not None
    answers = [held.sample(at).expected for at in range(len(held))]
    spoil(home, held._indexes[0], "details", 40)
    assert [held.sample(at).expected for at in range(len(held))] == answers
    spoil_sample(home, held._indexes[0], 600)
    with pytest.raises(SampleDamagedError):
        held.sample(0)
    with pytest.raises(SampleDamagedError):
        [held.pack(number) for number in range(len(held.pack_sets))]
    home.process(spec(), job=JOB)
    again = job_packs.open_evaluation(home.objects, spec(), job=JOB)
    assert again is not None
    assert [again.sample(at).expected for at in range(len(again))] == answers


@pytest.mark.parametrize("what", ["plan", "manifest", "shard", "samples", "tokenizer"])
@pytest.mark.parametrize("how", ["flipped", "gone", pytest.param("short", marks=pytest.mark.soak)])
def test_whatever_is_damaged_is_seen_before_a_run_starts_or_where_it_is_read_and_made_again(
    home: Home, what: str, how: str
) -> None:
    before = packs(home)
    source = job_packs.open_source(home.objects, spec(), job=JOB)
    root = store_folder(home.objects)
    plan = next(path for path in (root / "plans").iterdir())
    tokenizer = hub.process(spec(), registry_url=home.registry, objects_url=home.objects, job=JOB).tokenizer
    index = source._indexes[0]
    path = {
        "plan": plan,
        "manifest": root / blob_key(index.digest),
        "shard": root / blob_key(index.manifest.shards[0].digest),
        "samples": root / blob_key(next(iter(index.manifest.sample_shards))),
        "tokenizer": root / blob_key(tokenizer),
    }[what]
    match how:
        case "flipped":
            flip(path, path.stat().st_size // 2)
        case "gone":
            path.unlink()
        case _:
            path.write_bytes(path.read_bytes()[:-1])
    if stored_data.look(home.objects, spec(), job=JOB).whole:
        with pytest.raises(IndexDamagedError):
            open_and_read_all(home)
        assert not stored_data.look(home.objects, spec(), job=JOB).whole
    home.process(spec(), job=JOB)
    assert stored_data.look(home.objects, spec(), job=JOB).whole
    assert same(packs(home), before)
    assert job_packs.open_evaluation(home.objects, spec(), job=JOB) is not None
