"""Ingestion: a recipe's outcome is a sealed version, the same bytes each time, which jobs read as any dataset."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub import hub
from polyreme_datahub.digests import blob_key, digest_bytes
from polyreme_datahub.index.sample_shards import SampleShards
from polyreme_datahub.lakehouse import Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.recipes.files import read_shipped, shipped_recipes
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.registry.rebuild import rebuild_registry
from polyreme_datahub.runner import flow
from polyreme_datahub.runner.context import RunContext
from polyreme_datahub.runner.flow_meter import OperationProgress
from polyreme_datahub.source_ingestion import IngestReport, ingest_source
from polyreme_datahub.sources.samples import SamplesSource
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl

pytestmark = pytest.mark.slow
HERE = "tests.unit.datahub.ingest_operations"
SHIPPED = yaml.safe_load(read_shipped("captioned-pages"))
BOX = {"image": 0, "box": [10, 20, 110, 60], "label": "a"}


def recipe(**resize: Any) -> dict[str, Any]:
    """The shipped recipe with a smaller limit of sizes."""
    operations = [*SHIPPED["operations"][:-1], {"operation": "resize", "parameters": {"side_px_max": 64, **resize}}]
    return {"version": 1, "operations": operations}


STEPS = ("decode", "size-filter", "aspect-filter", "blur-filter", "image-hash", "deduplicate-images", "resize")


def write_source(folder: Path, count: int = 12) -> Path:
    """Pages; one is a copy, one is no image, one line is no JSON, one id is taken."""
    lines: list[dict[str, Any] | str] = []
    folder.mkdir()
    for at in range(count):
        seed = at if at != 5 else 4
        (folder / f"{at}.png").write_bytes(picture(200, 120, seed=seed))
        lines.append(record(f"r{at}", [f"{at}.png"], boxes=[BOX], points=[{"point": [10, 20]}]))
    (folder / "junk.png").write_bytes(b"junk")
    return write_jsonl(folder, [*lines, record("junk", ["junk.png"]), "{", record("r1", ["2.png"])])


def ingest(
    home: Home,
    source: Path | str,
    content: Mapping[str, Any],
    progress: Callable[[OperationProgress], None] | None = None,
) -> IngestReport:
    return hub.ingest(
        str(source),
        name="pages",
        recipe=content,
        registry_url=home.registry,
        objects_url=home.objects,
        progress=progress,
    )


def made(report: IngestReport) -> dict[str, int]:
    return {one.operation: one.made for one in report.operations if one.made}


def test_a_recipe_is_sealed_into_a_version_whose_counts_add_up(tmp_path: Path) -> None:
    home, seen = Home(tmp_path), list[OperationProgress]()
    report = ingest(home, write_source(tmp_path / "source"), recipe(), seen.append)
    assert (report.reference, report.records, report.samples, report.dead, report.dropped) == ("pages@1", 15, 11, 3, 1)
    left = report.records
    for one in report.operations:
        assert one.records == left == one.made + one.reused + one.dead + one.dropped
        left -= one.dead + one.dropped
    assert left == report.samples
    last = {one.operation: one for one in seen}
    assert set(last) == {"ingest", *STEPS, "seal"}
    assert all(one.done == one.total for one in last.values())
    shown = hub.show_dataset(home.registry, home.objects, "pages")
    assert shown.dead == 3
    assert {letter.sample_id for letter in shown.dead_letters} == {"junk", "line-14", "r1"}


def test_the_sealed_samples_are_what_the_last_step_left(tmp_path: Path) -> None:
    home = Home(tmp_path)
    report = ingest(home, write_source(tmp_path / "source"), recipe())
    store = open_store(home.objects)
    shards = SampleShards(store, report.manifest)
    assert shards.table.column("ordinal").to_pylist() == [0, 1, 2, 3, 4, *range(6, 12)]
    assert set(shards.table.column("width").to_pylist()) == {64}
    assert len(shards.table.column("image_hash_images_perceptual")[0].as_py()) == 16
    files = shards.read(3)
    content = json.loads(files["json"])
    assert content["images"] == [digest_bytes(files["jpg"])]
    assert content["boxes"][0]["box"] == pytest.approx([3.2, 6.333, 35.2, 19.0], abs=0.01)
    assert content["points"][0]["point"] == pytest.approx([3.2, 6.333], abs=0.01)
    assert content["conversations"][1]["content"] == "It is r3."
    with tarfile.open(fileobj=io.BytesIO(store.get(blob_key(shards.shards[0].digest)))) as archive:
        assert archive.getnames()[:2] == ["000000000000.jpg", "000000000000.json"]


def test_two_runs_and_two_homes_give_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flow, "GROUP", 5)
    source, homes = write_source(tmp_path / "source"), [Home(tmp_path / "one"), Home(tmp_path / "two")]
    for home in homes:
        home.folder.mkdir()
    first, other = (ingest(home, source, recipe()) for home in homes)
    assert first.manifest == other.manifest
    assert first.shards == 3
    again = ingest(homes[0], source, recipe())
    assert (again.reference, again.manifest, made(again)) == ("pages@1", first.manifest, {})


@pytest.mark.parametrize("at", [0, 7, 14, *(pytest.param(at, marks=pytest.mark.soak) for at in (3, 10, 17, 19))])
def test_killed_at_any_commit_it_continues_to_the_same_version(
    tmp_path: Path, at: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flow, "GROUP", 5)
    home, source = Home(tmp_path), write_source(tmp_path / "source")
    commits = 0

    def stop_at(_: OperationProgress) -> None:
        nonlocal commits
        commits += 1
        if commits == at + 1:
            raise KeyboardInterrupt

    stopped = False
    try:
        ingest(home, source, recipe(), stop_at)
    except KeyboardInterrupt:
        stopped = True
    assert stopped or commits <= at
    report = ingest(home, source, recipe())
    assert (report.reference, report.samples, report.dead, report.dropped) == ("pages@1", 11, 3, 1)
    clean = Home(tmp_path / "clean")
    clean.folder.mkdir()
    assert report.manifest == ingest(clean, source, recipe()).manifest


def test_a_changed_operation_is_recomputed_with_its_dependents_only(tmp_path: Path) -> None:
    home, source = Home(tmp_path), write_source(tmp_path / "source")
    ingest(home, source, recipe())
    changed = ingest(home, source, recipe(quality=50))
    assert made(changed) == {"resize": 11}
    assert changed.reference == "pages@2"
    filtered = recipe()
    filtered["operations"][3] = {"operation": "blur-filter", "parameters": {"sharpness_min": 6.0}}
    assert set(made(ingest(home, source, filtered))) <= {"blur-filter", "deduplicate-images"}


def test_a_job_trains_on_a_sealed_version_and_copies_no_image(tmp_path: Path) -> None:
    home = Home(tmp_path)
    ingest(home, write_source(tmp_path / "source"), recipe())
    report = home.process(make_spec(["pages"], sequence_tokens=128))
    assert (report.datasets[0].samples, report.datasets[0].dead_letters) == (11, ())
    assert {count.operation: count.hits for count in report.operations}["ingest"] == 11


def test_a_sealed_version_is_read_again_after_the_registry_is_lost(tmp_path: Path) -> None:
    home, other = Home(tmp_path), Home(tmp_path, url=f"sqlite:///{tmp_path}/other.sqlite")
    pages = write_source(tmp_path / "source")
    report = ingest(home, pages, recipe())
    first = home.process(make_spec(["pages"], sequence_tokens=128))
    database = open_database(other.registry)
    assert rebuild_registry(database, open_store(home.objects)).versions >= 1
    database.close()
    second = other.process(make_spec(["pages"], sequence_tokens=128))
    assert second.datasets[0].manifest == first.datasets[0].manifest
    again = ingest(other, pages, recipe())
    assert again.manifest == report.manifest
    assert made(again) == {"deduplicate-images": 11}, "a barrier alone decides again"
    source = SamplesSource({"manifest": report.manifest}, open_store(home.objects))
    assert source.record_id(0) == source.read(0).sample_id == "r0"


def test_lost_shards_and_images_are_made_again(tmp_path: Path) -> None:
    home, source = Home(tmp_path), write_source(tmp_path / "source")
    first = ingest(home, source, recipe())
    store = open_store(home.objects)
    for info in list(store.list("blobs/")):
        store.delete(info.key)
    assert ingest(home, source, recipe()).manifest == first.manifest
    assert SampleShards(store, first.manifest).read(0)["jpg"]


def test_a_recipe_that_nothing_comes_through_is_refused(tmp_path: Path) -> None:
    strict = {
        "version": 1,
        "operations": ["decode", {"operation": "size-filter", "parameters": {"side_px_min": 5000}}],
    }
    with pytest.raises(InvalidConfigError, match="no sample passed: all 15 records of pages/source@1 were dropped"):
        ingest(Home(tmp_path), write_source(tmp_path / "source"), strict)


def test_an_operation_of_ones_own_leaves_facts_and_no_addresses(tmp_path: Path) -> None:
    home, source, broken = Home(tmp_path), write_source(tmp_path / "source"), tmp_path / "broken"
    own = {
        "version": 1,
        "operations": [
            "decode",
            {"operation": f"{HERE}:shouting", "parameters": {"broken": str(broken)}},
            f"{HERE}:counting",
        ],
    }
    broken.touch()
    report = ingest(home, source, own)
    errors = [letter.error for letter in report.dead_letters if letter.stage == "shouting"]
    assert len(errors) == 4
    assert not [error for error in errors if "0x" in error]
    shards = SampleShards(open_store(home.objects), report.manifest)
    assert shards.table.column("shouting_text")[0].as_py() == "IT IS R1."
    assert shards.table.column("counting_letters")[0].as_py() == 9


def test_replay_after_a_fix_brings_the_samples_into_the_next_version(tmp_path: Path) -> None:
    home, source, broken = Home(tmp_path), write_source(tmp_path / "source"), tmp_path / "broken"
    own = recipe()
    own["operations"].insert(0, {"operation": f"{HERE}:shouting", "parameters": {"broken": str(broken)}})
    broken.touch()
    first = ingest(home, source, own)
    assert (first.samples, first.dead) == (7, 7)
    broken.unlink()
    assert ingest(home, source, own).reference == first.reference
    replayed = hub.replay(home.registry, "pages", "shouting")
    assert (replayed.source, replayed.records) == ("pages/source@1", 5)
    second = ingest(home, source, own)
    assert (second.reference, second.samples, second.dead) == ("pages@2", 11, 3)
    assert made(second)["shouting"] == 4
    clean = Home(tmp_path / "clean")
    clean.folder.mkdir()
    assert ingest(clean, source, own).manifest == second.manifest


def test_a_doubled_id_counts_as_dead_and_not_as_made(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("plain", write_source(tmp_path / "source"))
    home.process(make_spec(["plain"], sequence_tokens=128))
    shown = hub.show_dataset(home.registry, home.objects, "plain")
    left = shown.version.records
    for stage in shown.stages:
        assert stage.misses + stage.dead + stage.dropped == left
        left -= stage.dead + stage.dropped


def test_replay_of_a_plain_dataset_seals_its_index_again(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("plain", write_source(tmp_path / "source"))
    spec = make_spec(["plain"], sequence_tokens=128)
    first = home.process(spec)
    replayed = hub.replay(home.registry, "plain")
    assert (replayed.records, replayed.indexes) == (3, 1)
    second = home.process(spec)
    assert second.datasets[0].manifest == first.datasets[0].manifest
    assert len(second.datasets[0].dead_letters) == 3


@pytest.mark.parametrize("name", shipped_recipes())
def test_a_shipped_recipe_runs(tmp_path: Path, name: str) -> None:
    home = Home(tmp_path)
    report = ingest(home, write_source(tmp_path / "source", 4), yaml.safe_load(read_shipped(name)))
    assert report.samples


def test_progress_says_what_waits(tmp_path: Path) -> None:
    seen: list[OperationProgress] = []
    database = open_database(f"sqlite:///{tmp_path}/registry.sqlite")
    now = iter(range(10_000))
    store = open_store(f"file://{tmp_path}/objects")
    context = RunContext(database=database, lakehouse=Lakehouse(store), steady_s=lambda: float(next(now)), workers=1)
    ingest_source(context, str(write_source(tmp_path / "source")), "pages", recipe(), seen.append)
    decode = [one for one in seen if one.operation == "decode"]
    assert decode[0].rate_per_s is not None
    assert decode[0].left_s is not None
    assert [one.backlog for one in decode] == sorted((one.backlog for one in decode), reverse=True)
    database.close()
