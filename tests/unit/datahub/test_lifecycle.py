"""The public functions of a dataset's lifecycle, on a processed dataset of an embedded home."""

from __future__ import annotations

import zlib
from pathlib import Path

import pytest

from polyreme_api.errors import RefusedError
from polyreme_datahub import hub, lifecycle
from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import PredicateInvalidError, SourceInvalidError
from polyreme_datahub.objects import open_store
from tests.unit.datahub.jobs import Home, digits, make_spec, picture, record, write_jsonl


def test_a_processed_dataset_is_tagged_split_collected_and_trained_on_by_its_tag(tmp_path: Path) -> None:
    home = Home(tmp_path)
    urls = (home.registry, home.objects)
    home.register("two", digits(2, pages=60))
    hub.process(make_spec(["two"]), registry_url=home.registry, objects_url=home.objects)
    lifecycle.tag(home.registry, "two@1", "good")
    assert lifecycle.list_tags(home.registry, "two") == {"good": 1}
    report = hub.process(make_spec(["two@good"]), registry_url=home.registry, objects_url=home.objects)
    assert {count.misses for count in report.operations} == {0}
    made = lifecycle.subset(*urls, "two@good", "two/first", "ordinal < 20")
    assert made.records == 20
    with pytest.raises(PredicateInvalidError, match="price"):
        lifecycle.subset(*urls, "two", "two/none", "price > 1")
    with pytest.raises(SourceInvalidError, match="not valid"):
        lifecycle.subset(*urls, "two", ".draft/none", "ordinal > 1")
    parts = lifecycle.split(*urls, "two", {"train": 3, "test": 1}, "sample_id")
    assert sum(part.records for part in parts) == 60
    found = lifecycle.diff(home.registry, "two@1", "two/first@1")
    assert (found.same, found.removed, found.added) == (20, 40, 0)
    before = lifecycle.collect_garbage(*urls, grace_s=0.0, dry_run=True)
    assert before.condemned == before.deleted == (0, 0)
    lifecycle.collect_garbage(*urls, grace_s=0.0)
    again = hub.process(make_spec(["two@good"]), registry_url=home.registry, objects_url=home.objects)
    assert {count.misses for count in again.operations} == {0}
    assert lifecycle.untag(home.registry, "two", "good")
    kept = lifecycle.subset(*urls, "two", "two/last", "ordinal >= 20")
    hub.remove_dataset(*urls, "two/first")
    lost = (f"sqlite:///{tmp_path}/lost.sqlite", home.objects)
    rebuilt = lifecycle.rebuild_registry(*lost)
    assert rebuilt.versions == 4, "what was removed stays so"
    assert "two/first" not in [each.name for each in hub.list_datasets(lost[0])]
    assert (rebuilt.samples, kept.records) == (60 + 60 + 40, 40)
    anew = lifecycle.subset(*urls, "two", "two/first", "ordinal < 20")
    assert (anew.reference, lifecycle.rebuild_registry(*lost).versions) == ("two/first@1", 5)


def test_a_version_whose_records_were_not_read_is_neither_compared_nor_derived_from(tmp_path: Path) -> None:
    home = Home(tmp_path)
    path = write_jsonl(tmp_path, [record("a"), record("b"), record("gone", ["missing.png"])])
    home.register("mine", path)
    home.process(make_spec(["mine"]))
    write_jsonl(tmp_path, [record("b"), record("c")])
    home.register("mine", path)
    for refused in (
        lambda: lifecycle.diff(home.registry, "mine@1", "mine@2"),
        lambda: lifecycle.subset(home.registry, home.objects, "mine@2", "mine/some", "ordinal < 1"),
        lambda: lifecycle.split(home.registry, home.objects, "mine@2", {"train": 1, "test": 1}, "sample_id"),
    ):
        with pytest.raises(RefusedError, match=r"0 of 2 records of mine@2 are read yet: ingest it, or run a job on it"):
            refused()
    home.process(make_spec(["mine@2"]))
    compared = lifecycle.diff(home.registry, "mine@1", "mine@2")
    assert (compared.added, compared.removed, compared.same) == (1, 1, 1), "a dead letter is read, too"


def test_a_rebuilt_registry_knows_what_operations_made(tmp_path: Path) -> None:
    home, other = Home(tmp_path), Home(tmp_path, url=f"sqlite:///{tmp_path}/other.sqlite")
    lines = [record(f"r{at}", [f"{at % 4}.png"]) for at in range(30)] + [record("bad", ["missing.png"])]
    for at in range(4):
        (tmp_path / f"{at}.png").write_bytes(picture(56, 28, seed=at))
    home.register("mine", write_jsonl(tmp_path, lines))
    first = home.process(make_spec(["mine"]))
    rebuilt = lifecycle.rebuild_registry(other.registry, home.objects)
    assert (rebuilt.samples, rebuilt.damaged) == (30, [])
    second = other.process(make_spec(["mine"]))
    assert second.datasets[0].manifest == first.datasets[0].manifest
    assert second.datasets[0].dead_letters == first.datasets[0].dead_letters
    made = {count.operation: count.misses for count in second.operations if count.misses}
    assert made == {"index": 30}, "the index alone is made again"


def test_what_lists_of_results_name_and_is_gone_is_made_again(tmp_path: Path) -> None:
    home, other = Home(tmp_path), Home(tmp_path, url=f"sqlite:///{tmp_path}/other.sqlite")
    (tmp_path / "a.png").write_bytes(picture(56, 28))
    home.register("mine", write_jsonl(tmp_path, [record(f"r{at}", ["a.png"]) for at in range(8)]))
    first = home.process(make_spec(["mine"]))
    store = open_store(home.objects)
    lists = [info.key for info in store.list("versions/mine/1/results/")]
    store.put(lists[0], b"torn")
    other_format = zlib.compress(b'{"format":2}\n')
    newer = f"versions/mine/1/results/{digest_bytes(zlib.decompress(other_format))}.jsonl.zz"
    store.put(newer, other_format)
    listing = store.get("versions/mine/1.json").decode()
    for info in list(store.list("blobs/")):
        if info.key.rpartition("/")[2] not in listing:
            store.delete(info.key)
    rebuilt = lifecycle.rebuild_registry(other.registry, home.objects)
    assert (rebuilt.samples, rebuilt.artifacts) == (0, 0)
    assert {note.partition(":")[0] for note in rebuilt.damaged} == {lists[0], newer}
    assert rebuilt.unsealed == ["mine@1"]
    assert other.process(make_spec(["mine"])).datasets[0].manifest == first.datasets[0].manifest
    hub.remove_dataset(other.registry, home.objects, "mine@1")
    assert list(store.list("versions/mine/1/results/")) == []
