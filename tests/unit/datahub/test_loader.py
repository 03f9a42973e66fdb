"""Packs and held-out samples as the trainer gets them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any
from zlib import crc32

import numpy as np
import numpy.typing as npt
import pytest
from PIL import Image

from polyreme_api.batch import IGNORED_TARGET, PackedBatch
from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, RefusedError
from polyreme_api.job.data import MixtureChange, SourceWeight
from polyreme_api.job.model import Training
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key
from polyreme_datahub.errors import BadRecordError, IndexDamagedError
from polyreme_datahub.index.sample_bytes import RECORD_FILE
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.evaluation import HeldOutSource
from polyreme_datahub.loader.open import entries_of_state, open_packs, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.sample import documents
from polyreme_datahub.loader.sample import reader as sample_reader
from polyreme_datahub.loader.sample.pixels import ImageChange, change_pixels
from polyreme_datahub.loader.sample.reader import page_image
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.objects import store_folder
from polyreme_datahub.sources.digits import scans_of
from polyreme_planner.mixture import first_mixture
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow
LATE = {"source": "s1", "weight": 1}


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("home"))
    home.register("one", digits(1, pages=120))
    home.register("three", digits(3, pages=90))
    home.register("three-heldout", digits(3, pages=40, heldout=True))
    home.process(spec())
    return home


def spec() -> TrainingJobSpec:
    return make_spec(["one", "three"], heldout=["three-heldout"], schedule=[(4, [1, 1])], weights=[1, 0])


def same(one: PackedBatch, other: PackedBatch) -> bool:
    names = ("tokens_T", "targets_T", "positions_T", "document_offsets", "patches_PC", "grids_I2")
    return list(one.sample_ids) == list(other.sample_ids) and all(
        np.array_equal(np.asarray(getattr(one, name)), np.asarray(getattr(other, name))) for name in names
    )


def test_targets_are_the_next_tokens_of_answers_only(home: Home) -> None:
    source = job_packs.open_source(home.objects, spec())
    batch = source.packs(5, first=0, count=4)
    tokens, targets = np.asarray(batch.tokens_T), np.asarray(batch.targets_T)
    bounds = np.asarray(batch.document_offsets)
    assert (bounds[0], bounds[-1], tokens.size) == (0, 4 * 64, 4 * 64)
    assert int((targets != IGNORED_TARGET).sum()) == batch.unmasked_tokens > 0
    for start, stop in pairwise(bounds):
        learned = np.flatnonzero(targets[start:stop] != IGNORED_TARGET)
        assert targets[stop - 1] == IGNORED_TARGET
        assert np.array_equal(targets[start:stop][learned], tokens[start:stop][learned + 1])
        if learned.size:
            assert learned.size in {2, 4}, "one or three digits, and the end"
            assert targets[start:stop][learned[-1]] == source.token_ids.end
            assert np.array_equal(learned, np.arange(learned[0], learned[-1] + 1))
        assert np.array_equal(np.asarray(batch.positions_T)[start:stop], np.arange(stop - start))


def test_media_tokens_fit_the_grids_and_the_patches(home: Home) -> None:
    source = job_packs.open_source(home.objects, spec())
    batch = source.packs(6, first=1, count=3)
    grids = np.asarray(batch.grids_I2)
    assert len(grids) == len(batch.sample_ids)
    assert (
        int((np.asarray(batch.tokens_T) == source.token_ids.media).sum()) == int((grids[:, 0] * grids[:, 1]).sum()) // 4
    )
    patches = np.asarray(batch.patches_PC)
    assert patches.shape == (int((grids[:, 0] * grids[:, 1]).sum()), 3 * 14 * 14)
    assert patches.dtype == np.uint8
    assert patches.min() < 128 < patches.max()


def test_patches_are_the_page_cut_row_by_row(home: Home) -> None:
    from io import BytesIO

    from PIL import Image

    held = job_packs.open_evaluation(home.objects, spec())
    assert held is not None
    sample = held.sample(3)
    png = hub.read_image(home.registry, home.objects, sample.image_digest)
    page = np.asarray(Image.open(BytesIO(png)))
    rows, columns = np.asarray(sample.grids_I2)[0]
    patches = np.asarray(sample.patches_PC).reshape(rows, columns, 3, 14, 14)
    for row in range(rows):
        for column in range(columns):
            cut = page[row * 14 : row * 14 + 14, column * 14 : column * 14 + 14]
            assert np.array_equal(patches[row, column], np.broadcast_to(cut, (3, 14, 14)))


def test_any_split_over_ranks_gives_the_same_packs(home: Home) -> None:
    whole = job_packs.open_source(home.objects, spec()).packs(7, first=0, count=4)
    part = job_packs.open_source(home.objects, spec())
    pieces = [part.packs(7, first=at, count=1) for at in (3, 0, 2, 1)]
    ordered = [pieces[1], pieces[3], pieces[2], pieces[0]]
    assert np.array_equal(np.concatenate([np.asarray(p.tokens_T) for p in ordered]), np.asarray(whole.tokens_T))
    assert np.array_equal(np.concatenate([np.asarray(p.patches_PC) for p in ordered]), np.asarray(whole.patches_PC))


def test_a_forked_rank_reads_the_same_packs(home: Home) -> None:
    source = job_packs.open_source(home.objects, spec())
    here = source.packs(2, first=0, count=4)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        fine = False
        try:
            fresh = job_packs.open_source(home.objects, spec())
            fine = same(source.packs(2, first=0, count=4), here) and same(fresh.packs(2, first=0, count=4), here)
        finally:
            os.write(writer, b"y" if fine else b"n")
            os._exit(0)
    os.waitpid(child, 0)
    assert os.read(reader, 1) == b"y"
    os.close(reader)
    os.close(writer)


def test_a_rank_imports_neither_database_nor_store_nor_images() -> None:
    code = (
        "import sys; import polyreme_datahub.loader.job_packs; "
        "heavy = {'sqlalchemy', 'alembic', 'obstore', 'pyarrow', 'PIL', 'tokenizers', 'sklearn', 'torch'}; "
        "heavy &= set(sys.modules); "
        "print(*sorted(heavy))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "", "")


def test_the_held_out_answer_is_not_in_the_prompt(home: Home) -> None:
    held = job_packs.open_evaluation(home.objects, spec())
    assert held is not None
    assert len(held) == 20
    sample = held.sample(0)
    assert len(sample.expected) == 3
    assert sample.expected not in held.text(sample.prompt_tokens)
    assert held.text(sample.prompt_tokens) == sample.question == "Which digits, left to right?"


def test_training_and_held_out_pages_share_no_scan() -> None:
    assert not set(scans_of(heldout=False)) & set(scans_of(heldout=True))
    assert len(scans_of(heldout=False)) + len(scans_of(heldout=True)) == 1797


def in_stages(given: TrainingJobSpec, *stages: dict[str, Any]) -> TrainingJobSpec:
    """The same job in stages."""
    training = given.training.model_dump(by_alias=True) | {"stages": list(stages)}
    return given.model_copy(update={"training": Training.model_validate(training)})


def staged() -> TrainingJobSpec:
    """As ``spec``, with a stage of longer packs from step 5 on."""
    return in_stages(
        spec(),
        {"name": "usual", "steps": 4},
        {"name": "long", "steps": 96, "sequenceTokens": 128, "packsPerStep": 2, "weights": [LATE]},
    )


def test_a_stage_of_longer_packs_goes_on_where_the_one_before_ended(home: Home) -> None:
    home.process(staged())
    usual, source = (job_packs.open_source(home.objects, given) for given in (spec(), staged()))
    assert [(source.packs_in(step), source.pack_tokens_in(step)) for step in (1, 4, 5, 100)] == [
        (4, 64), (4, 64), (2, 128), (2, 128),
    ]  # fmt: skip
    assert same(source.packs(3, first=0, count=4), usual.packs(3, first=0, count=4)), "the same up to the border"
    late = source.packs(9, first=0, count=2)
    assert (len(np.asarray(late.tokens_T)), np.asarray(late.document_offsets)[-1]) == (256, 256)
    fresh = job_packs.open_source(home.objects, staged())
    fresh.check_state(source.state(8))
    assert same(fresh.packs(9, first=0, count=2), late), "from the state of a checkpoint, without the steps before"
    assert same(
        fresh.packs(9, first=1, count=1), job_packs.open_source(home.objects, staged()).packs(9, first=1, count=1)
    )
    with pytest.raises(RefusedError, match="no packs 0\\.\\.5: step 9 has 2"):
        source.packs(9, first=0, count=5)
    with pytest.raises(RefusedError, match="loader state belongs to other data"):
        usual.check_state(source.state(8))


def test_samples_that_only_a_later_stage_can_hold_wait_for_it(home: Home) -> None:
    short = make_spec(["three"], sequence_tokens=16)
    long = in_stages(short, {"name": "short", "steps": 4}, {"name": "long", "steps": 96, "sequenceTokens": 64})
    dead = [sum(count.dead for count in home.process(given).operations) for given in (long, short)]
    assert dead[0] == 0 < dead[1], "too long for a job of short packs alone, not for the longest packs of stages"
    source = job_packs.open_source(home.objects, long)
    lengths = {index.sample_id(at): int(n) for index in source._indexes for at, n in enumerate(index.lengths)}
    seen = {step: source.packs(step, first=0, count=4).sample_ids for step in range(1, 13)}
    longest = {step: max(lengths[name] for name in names) for step, names in seen.items()}
    assert max(longest[step] for step in range(1, 5)) <= 16 < max(longest[step] for step in range(5, 13))


def test_held_out_packs_hold_each_sample_once_with_its_answer(home: Home) -> None:
    held = job_packs.open_evaluation(home.objects, spec())
    assert held is not None
    assert held.set_names == ["h0"]
    assert set(held.pack_sets) == {0}
    packs = [held.pack(number) for number in range(len(held.pack_sets))]
    assert sorted(name for batch in packs for name in batch.sample_ids) == sorted(
        held.sample(index).sample_id for index in range(len(held))
    )
    assert [np.asarray(batch.tokens_T).size for batch in packs] == [64] * len(packs)
    assert sum(batch.unmasked_tokens for batch in packs) == 4 * len(held), "three digits and the end"
    behind = held.pack(len(packs))
    assert (behind.unmasked_tokens, list(behind.sample_ids)) == (0, [])
    assert np.asarray(behind.document_offsets).tolist() == [0, 64]


def test_a_state_of_other_data_is_refused(home: Home) -> None:
    source = job_packs.open_source(home.objects, spec())
    source.check_state(source.state(9))
    other = make_spec(["one", "three"], heldout=["three-heldout"], schedule=[(4, [1, 1])], weights=[1, 0], seed=4)
    with pytest.raises(RefusedError, match="other data"):
        job_packs.open_source(home.objects, other).check_state(source.state(9))


def test_checkpoints_of_releases_without_appended_changes_continue_and_say_what_they_knew(home: Home) -> None:
    change = MixtureChange(from_step=33, weights=[SourceWeight(source="s1", weight=1)])
    data = spec().data.model_copy(update={"schedule": [*spec().data.schedule, change]})
    appended = spec().model_copy(update={"data": data})
    before = job_packs.open_source(home.objects, spec()).state(9)
    after = job_packs.open_source(home.objects, appended, mixture=first_mixture(appended, entries=1, resume_step=9))
    after.check_state(before)
    assert entries_of_state(home.objects, appended, before, job="") == 1
    assert entries_of_state(home.objects, appended, {"data": "others"}, job="") is None


def test_data_that_is_not_processed_is_waited_for_and_then_named(home: Home) -> None:
    with pytest.raises(EnvironmentFailedError, match="not processed"):
        job_packs.open_source(home.objects, spec(), job="another")


def test_a_placeholder_of_the_same_length_takes_the_place_of_a_damaged_sample(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=40))
    job = make_spec(["one"], on_damage="Placeholder")
    manifest = home.process(job).datasets[0].manifest
    whole = job_packs.open_source(home.objects, job)
    before = [whole.packs(step, first=0, count=4) for step in (1, 2)]
    spoil_sample(home, whole, 600)
    damaged = job_packs.open_source(home.objects, job)
    after = [damaged.packs(step, first=0, count=4) for step in (1, 2)]
    holes = 0
    for old, new in zip(before, after, strict=True):
        assert np.array_equal(np.asarray(old.document_offsets), np.asarray(new.document_offsets))
        holes += sum(name.startswith("placeholder:") for name in new.sample_ids)
        assert new.unmasked_tokens <= old.unmasked_tokens
    assert holes >= 1
    stones = hub.show_dataset(home.registry, home.objects, "one").tombstones
    assert [(stone.index_digest, stone.ordinal) for stone in stones] == [(manifest, 0)]


def test_a_source_without_pixels_makes_no_patches_and_finds_the_same_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Later pipeline stages train on its tokens, the first one on those of a source with pixels: they must agree."""
    home = Home(tmp_path)
    home.register("one", digits(1, pages=40))
    job = make_spec(["one"], on_damage="Placeholder")
    home.process(job)
    resized: list[object] = []

    def decode(files: Mapping[str, memoryview], page: Mapping[str, Any], least: tuple[int, int]) -> Image.Image:
        if crc32(files[RECORD_FILE]) % 3 == 0:
            raise BadRecordError("planted: it can't be decoded", rule="decode")
        return page_image(files, page, least)

    def resize(image: Image.Image, change: ImageChange, *, pixel_version: int) -> npt.NDArray[np.uint8]:
        resized.append(image)
        return change_pixels(image, change, pixel_version=pixel_version)

    monkeypatch.setattr(sample_reader, "page_image", decode)
    monkeypatch.setattr(sample_reader, "change_pixels", resize)
    whole, bare = (
        open_packs(home.objects, job, job="", wait_s=0.0, sleep=sleep_really, pixels=pixels) for pixels in (True, False)
    )
    without = [bare.packs(step, first=0, count=4) for step in (1, 2)]
    assert not resized
    for step, batch in enumerate(without, start=1):
        expected = whole.packs(step, first=0, count=4)
        assert {name.startswith("placeholder:") for name in batch.sample_ids} == {True, False}
        assert batch.sample_ids == expected.sample_ids
        assert (batch.unmasked_tokens, batch.lost_images) == (expected.unmasked_tokens, expected.lost_images)
        for name in ("tokens_T", "targets_T", "positions_T", "document_offsets", "grids_I2"):
            np.testing.assert_array_equal(np.asarray(getattr(batch, name)), np.asarray(getattr(expected, name)))
        assert np.asarray(batch.patches_PC).shape == (0, np.asarray(expected.patches_PC).shape[1])
    with pytest.raises(RefusedError, match="opened without pixels"):
        bare.patches(1, pack=0, images=[0])


def test_images_of_any_pack_are_looked_up_and_read_one_by_one(tmp_path: Path) -> None:
    """By numbers that count what a damaged sample had: grids are the same for all ranks, also where its bytes were
    read."""
    home = Home(tmp_path)
    home.register("one", digits(1, pages=40))
    job = make_spec(["one"], on_damage="Placeholder")
    home.process(job)
    whole = job_packs.open_source(home.objects, job)
    spoil_sample(home, whole, 600)
    damaged = job_packs.open_source(home.objects, job)
    lost_in_all = 0
    for step in (1, 2):
        packs = damaged.packs_in(step)
        grids = damaged.grids(step, first=0, count=packs)
        assert [len(of) for of in grids] == [len(of) for of in whole.grids(step, first=0, count=packs)]
        assert np.array_equal(np.concatenate(damaged.grids(step, first=1, count=2)), np.concatenate(grids[1:3]))
        for pack, grids_I2 in enumerate(grids):
            batch = damaged.packs(step, first=pack, count=1)
            lost = list(batch.lost_images)
            lost_in_all += len(lost)
            assert np.array_equal(np.delete(grids_I2, lost, axis=0), np.asarray(batch.grids_I2))
            read = [damaged.patches(step, pack=pack, images=[image]) for image in range(len(grids_I2))]
            assert [len(patches_PC) for patches_PC in read] == grids_I2.prod(axis=1).tolist()
            assert not any(read[image].any() for image in lost)
            there = [patches_PC for image, patches_PC in enumerate(read) if image not in lost]
            assert np.array_equal(np.concatenate([read[0][:0], *there]), np.asarray(batch.patches_PC))
            some = list(range(0, len(grids_I2), 2))
            joined = damaged.patches(step, pack=pack, images=some)
            assert np.array_equal(joined, np.concatenate([read[0][:0], *(read[image] for image in some)]))
        batch = damaged.packs(step, first=0, count=4)
        sizes = [len(damaged.packs(step, first=pack, count=1).lost_images) for pack in range(4)]
        assert len(batch.lost_images) == sum(sizes)
        assert np.array_equal(np.delete(np.concatenate(grids), list(batch.lost_images), axis=0), batch.grids_I2)
    assert lost_in_all > 0


def test_threads_may_share_a_source(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(documents, "PATCH_CACHE_BYTES_MAX", 20_000)
    shared, alone = (job_packs.open_source(home.objects, spec()) for _ in range(2))
    with ThreadPoolExecutor(4) as pool:
        read = list(pool.map(lambda step: shared.packs(step, first=0, count=4), [*range(1, 40), *range(30, 0, -1)]))
    for step, batch in zip([*range(1, 40), *range(30, 0, -1)], read, strict=True):
        assert same(batch, alone.packs(step, first=0, count=4))


def spoil(home: Home, source: PackedSource | HeldOutSource, array: str, at: int) -> None:
    """Flip a byte of a shard's array."""
    shard = source._indexes[0].manifest.shards[0]
    place = next(place for place in shard.arrays if place.name == array)
    path = store_folder(home.objects) / blob_key(shard.digest)
    data = bytearray(path.read_bytes())
    data[place.start + at] ^= 255
    path.write_bytes(bytes(data))


def spoil_sample(home: Home, source: PackedSource | HeldOutSource, at: int) -> None:
    """Flip a byte of the first sample of a sample shard."""
    path = store_folder(home.objects) / blob_key(next(iter(source._indexes[0].manifest.sample_shards)))
    data = bytearray(path.read_bytes())
    data[at] ^= 255
    path.write_bytes(bytes(data))


@pytest.mark.parametrize("at", [3, 600], ids=["name", "record"])
def test_all_ranks_see_the_same_placeholder_at_any_time(tmp_path: Path, at: int) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=40))
    job = make_spec(["one"], on_damage="Placeholder")
    home.process(job)
    spoil_sample(home, job_packs.open_source(home.objects, job), at)
    one, two, four = (job_packs.open_source(home.objects, job) for _ in range(3))
    four.packs(5, first=0, count=4)
    holes = 0
    for step in (3, 1, 2):
        whole = one.packs(step, first=0, count=4)
        halves = [two.packs(step, first=first, count=2) for first in (2, 0)][::-1]
        quarters = [four.packs(step, first=first, count=1) for first in range(4)]
        for parts in (halves, quarters):
            for name in ("tokens_T", "targets_T", "patches_PC", "grids_I2"):
                joined = np.concatenate([np.asarray(getattr(part, name)) for part in parts])
                assert np.array_equal(joined, np.asarray(getattr(whole, name)))
            assert [name for part in parts for name in part.sample_ids] == list(whole.sample_ids)
            assert sum(part.unmasked_tokens for part in parts) == whole.unmasked_tokens
        for batch in (whole, *halves, *quarters):
            assert batch.unmasked_tokens == int((np.asarray(batch.targets_T) != IGNORED_TARGET).sum())
        holes += sum(name.startswith("placeholder:digits-1t") for name in whole.sample_ids)
    assert holes >= 1


@pytest.mark.parametrize("array", ["token_counts", "grids_I2", "ids", "token_checks", "details", "digests", "starts"])
def test_an_index_whose_structure_is_damaged_is_refused(tmp_path: Path, array: str) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=20))
    job = make_spec(["one"])
    home.process(job)
    spoil(home, job_packs.open_source(home.objects, job), array, 8)
    with pytest.raises(IndexDamagedError, match="offsets, names or grids"):
        job_packs.open_source(home.objects, job)
    home.process(job)
    assert job_packs.open_source(home.objects, job).packs(1, first=0, count=4).unmasked_tokens > 0


@pytest.mark.parametrize("spoiled", ["manifest", "shard", "short shard", "samples", "short samples"])
def test_an_index_that_is_gone_is_made_again(tmp_path: Path, spoiled: str) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=20))
    job = make_spec(["one"])
    manifest = home.process(job).datasets[0].manifest
    source = job_packs.open_source(home.objects, job)
    before = source.packs(1, first=0, count=4)
    index = source._indexes[0].manifest
    digest = manifest if spoiled == "manifest" else index.shards[0].digest
    if spoiled.endswith("samples"):
        digest = next(iter(index.sample_shards))
    path = store_folder(home.objects) / blob_key(digest)
    if spoiled.startswith("short"):
        path.write_bytes(path.read_bytes()[:-1])
    else:
        path.unlink()
    with pytest.raises(IndexDamagedError):
        job_packs.open_source(home.objects, job)
    assert home.process(job).datasets[0].manifest == manifest
    assert same(job_packs.open_source(home.objects, job).packs(1, first=0, count=4), before)


def test_a_damaged_held_out_sample_is_left_out(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("one", digits(1, pages=20))
    home.register("held", digits(1, pages=20, heldout=True))
    job = make_spec(["one"], heldout=["held"], samples_max=10, on_damage="Placeholder")
    home.process(job)
    before = job_packs.open_evaluation(home.objects, job)
    assert before is not None
    names = [before.sample(at).sample_id for at in range(len(before))]
    spoil_sample(home, before, 600)
    after = job_packs.open_evaluation(home.objects, job)
    assert after is not None
    assert [after.sample(at).sample_id for at in range(len(after))] == names[1:]


def test_a_tiny_cache_gives_the_same_packs_and_stays_bounded(home: Home, monkeypatch: pytest.MonkeyPatch) -> None:
    roomy = job_packs.open_source(home.objects, spec())
    packs = [roomy.packs(step, first=0, count=4) for step in range(1, 10)]
    monkeypatch.setattr(documents, "PATCH_CACHE_BYTES_MAX", 20_000)
    tight = job_packs.open_source(home.objects, spec())
    for _ in range(2):
        for step in range(1, 10):
            assert same(tight.packs(step, first=0, count=4), packs[step - 1])
            kept = [document.size_bytes for document in tight._documents._kept.values()]
            assert sum(kept) == tight._documents._kept_bytes
            assert sum(kept) <= 20_000 or len(kept) == 1
    assert len(roomy._documents._kept) > len(tight._documents._kept)


def test_only_folders_and_buckets_are_object_stores() -> None:
    with pytest.raises(InvalidConfigError, match="file:///"):
        job_packs.open_source("gs://bucket/prefix", make_spec(["one"]))


@pytest.mark.parametrize("split", [StepSplit(2), StepSplit(2, 2), StepSplit(4)], ids=str)
def test_packs_by_cost_are_the_packs_of_the_step_at_other_places(home: Home, split: StepSplit) -> None:
    """With their grids, patches and turns; identity and state are the order's, whatever the number of ranks."""
    balanced = make_spec(
        ["one", "three"], heldout=["three-heldout"], schedule=[(4, [1, 1])], weights=[1, 0], packs_by="Cost"
    )
    ordered = job_packs.open_source(home.objects, spec())
    source = open_packs(home.objects, balanced, job="", wait_s=0.0, sleep=sleep_really, split=split)
    moved = 0
    for step in (9, *range(4, 12)):
        theirs = [ordered.packs(step, first=at, count=1) for at in range(4)]
        ours = [source.packs(step, first=at, count=1) for at in range(4)]
        places = [next(at for at, their in enumerate(theirs) if same(our, their)) for our in ours]
        assert sorted(places) == [0, 1, 2, 3]
        moved += places != [0, 1, 2, 3]
        for at, (pack, grids) in enumerate(zip(ours, source.grids(step, first=0, count=4), strict=True)):
            assert np.array_equal(np.asarray(pack.grids_I2), grids)
            assert np.array_equal(np.asarray(pack.patches_PC), source.patches(step, pack=at, images=range(len(grids))))
            found = source.find(pack.sample_ids[0])
            assert at in {turn.pack for turn in source.turns(found, step)}
        assert source.state(step) == ordered.state(step)
    assert (moved > 0) == (split.data_ranks < 4), "with a pack for each rank there is nothing to balance"
    source.check_state(ordered.state(6))
    ordered.check_state(source.state(6))
