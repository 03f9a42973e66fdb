"""What every registry promises about versions that are tagged, pinned, compared, derived, collected and rebuilt."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sqlalchemy import delete, select, update

from polyreme_api.errors import NotFoundError
from polyreme_api.store import ObjectStore
from polyreme_datahub.digests import blob_key, canonical_json
from polyreme_datahub.errors import (
    BlobDeletingError,
    CollectionStoppedError,
    SourceInvalidError,
    VersionPinnedError,
)
from polyreme_datahub.lakehouse import Artifact, Lakehouse
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry import (
    blobs,
    collection,
    datasets,
    derived,
    diff,
    pins,
    rebuild,
    results,
    schema,
    tags,
    work_items,
)
from polyreme_datahub.registry.collection import CollectionReport, collect
from polyreme_datahub.registry.derived import Derivation
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.predicate import parse_predicate
from polyreme_datahub.registry.result_lists import store_list
from polyreme_datahub.registry.rows import Action, IndexRow, Results, SampleRow
from polyreme_datahub.registry.work_items import WorkItem
from tests.contract.datahub.work_contract import at_once, item

DAY_S = 86400.0
WEEK_S = 7 * DAY_S


class LifecycleContract:
    """Subclasses give ``url``."""

    @pytest.fixture
    def empty(self, url: str) -> Iterator[Database]:
        database = open_database(url)
        yield database
        database.close()

    def test_a_tag_names_a_version_until_it_is_moved(self, empty: Database) -> None:
        first, second = (add(empty, "a", f"{at}") for at in range(2))
        tags.set_tag(empty, "a@1", "good", now_s=1.0)
        assert datasets.find_version(empty, "a@good") == first
        tags.set_tag(empty, "a", "good", now_s=2.0)
        tags.set_tag(empty, "a@1", "old", now_s=2.0)
        assert datasets.find_version(empty, "a@good") == second
        assert tags.tags_of(empty, "a") == {"good": 2, "old": 1}
        assert tags.remove_tag(empty, "a", "good")
        datasets.remove_versions(empty, "a", 1)
        assert tags.tags_of(empty, "a") == {}
        with pytest.raises(NotFoundError, match="a has the versions 2"):
            datasets.find_version(empty, "a@good")
        with pytest.raises(SourceInvalidError, match="lower-case letter"):
            tags.set_tag(empty, "a", "1", now_s=1.0)

    def test_a_pinned_version_is_not_removed_until_its_holder_releases_it(self, empty: Database) -> None:
        version = add(empty, "a", "x")
        pins.pin(empty, "job-uid", [version.id], now_s=1.0)
        pins.pin(empty, "job-uid", [version.id], now_s=2.0)
        with pytest.raises(VersionPinnedError, match="a@1 is needed by job-uid"):
            datasets.remove_versions(empty, "a", None)
        assert pins.holders_after(empty, "", count_max=9) == ["job-uid"]
        assert pins.release(empty, "job-uid") == 1
        assert datasets.remove_versions(empty, "a", None) == [1]
        with pytest.raises(NotFoundError, match="was removed before late began"):
            pins.pin(empty, "late", [version.id], now_s=1.0)

    def test_a_version_is_pinned_or_removed_and_never_both(self, empty: Database) -> None:
        for round_ in range(8):
            version = add(empty, "a", f"{round_}")
            ended: list[str] = []

            def pin(version_id: int = version.id, ended: list[str] = ended) -> None:
                with suppress(NotFoundError):
                    pins.pin(empty, "job", [version_id], now_s=1.0)
                    ended.append("pinned")

            def remove(number: int = version.number, ended: list[str] = ended) -> None:
                with suppress(VersionPinnedError):
                    if datasets.remove_versions(empty, "a", number):
                        ended.append("removed")

            at_once([pin, remove])
            assert len(ended) == 1
            pins.release(empty, "job")

    def test_versions_are_compared_by_sample_and_record(self, empty: Database) -> None:
        before, after = add(empty, "a", "x"), add(empty, "a", "y")
        fill(empty, before, [(f"s{at:04d}", f"r{at}") for at in range(1200)])
        fill(empty, after, [(f"s{at:04d}", f"r{at}" if at % 2 else "new") for at in range(1199, 99, -1)] + [("t", "r")])
        found = diff.diff(empty, before.id, after.id, shown_max=3)
        assert (found.added, found.removed, found.changed, found.same) == (1, 100, 550, 550)
        assert found.first_removed == ["s0000", "s0001", "s0002"]
        assert (found.first_added, found.first_changed) == (["t"], ["s1198", "s1196", "s1194"])

    def test_a_subset_is_a_version_of_its_own_that_shows_itself_whole_or_not_at_all(self, empty: Database) -> None:
        version = add(empty, "a", "x")
        fill(empty, version, [(f"s{at}", f"r{at}") for at in range(50)])
        takes = parse_predicate("ordinal >= 10 and ordinal != 20", ["ordinal"])
        derivation = Derivation(name="a/late", source={"kind": "subset", "of": version.reference}, takes=takes)

        def subset(token: str, *, rows_max: int = 99) -> datasets.DatasetVersion:
            rows = cut(derived.rows_with_columns(empty, version.id), rows_max)
            (made,) = derived.derive(empty, [derivation], rows, token=token, now_s=5.0)
            return made

        with pytest.raises(InterruptedError):
            subset("killed", rows_max=30)
        assert datasets.names(empty) == ["a"]
        assert [one.name for one in datasets.newest_versions(empty, after="", count_max=9)] == ["a"]
        made = subset("one")
        assert (made.reference, made.records) == ("a/late@1", 39)
        samples = results.samples_between(empty, made.id, first=0, count=99)
        assert [(row.ordinal, row.sample_id) for row in samples[:2]] == [(0, "s10"), (1, "s11")]
        assert subset("two") == made
        assert derived.remove_drafts(empty, older_than_s=4.0) == 0
        while derived.remove_drafts(empty, older_than_s=6.0):
            pass
        left = empty.read(lambda connection: connection.execute(select(schema.versions.c.name)).scalars().all())
        assert sorted(left) == ["a", "a/late"]
        with pytest.raises(SourceInvalidError, match="no sample"):
            derived.derive(empty, [derivation], [], token="none", now_s=1.0)

    def test_no_group_is_in_two_splits(self, empty: Database) -> None:
        version = add(empty, "a", "x")
        fill(empty, version, [(f"page{at % 300}-{at}", f"r{at}") for at in range(1500)])
        takers = derived.split_takers({"train": 8, "test": 2}, lambda row: row["sample_id"].partition("-")[0])
        derivations = [
            Derivation(name=f"a/{name}", source={"kind": "split", "part": name}, takes=takes)
            for name, takes in takers.items()
        ]
        rows = derived.rows_with_columns(empty, version.id)
        made = derived.derive(empty, derivations, rows, token="t", now_s=1.0)
        groups = [
            {row.sample_id.partition("-")[0] for row in results.samples_between(empty, one.id, first=0, count=2000)}
            for one in made
        ]
        assert sum(one.records for one in made) == 1500
        assert not groups[0] & groups[1]
        assert 0.1 < len(groups[1]) / 300 < 0.3

    def test_what_nothing_reaches_is_deleted_after_its_grace(self, empty: Database, tmp_path: Path) -> None:
        home = Home(empty, tmp_path)
        kept, gone = home.version("kept"), home.version("gone")
        stray = home.lakehouse.put_blob(b"stray")
        everything = home.stored()
        assert home.collect(0.0).condemned == (0, 0)
        datasets.remove_versions(empty, "gone", None)
        dry = home.collect(1 * DAY_S, dry_run=True)
        assert (dry.condemned[0], dry.deleted[0]) == (len(gone) + 1, 0)
        assert home.collect(2 * DAY_S).condemned == dry.condemned
        assert home.collect(8 * DAY_S).deleted == (0, 0)
        assert home.stored() == everything
        dry = home.collect(10 * DAY_S, dry_run=True)
        assert home.collect(10 * DAY_S).deleted == dry.deleted == (len(gone) + 1, dry.deleted[1])
        assert home.stored() == everything - gone - {stray}
        assert kept <= home.stored()
        assert set(results.outputs_of(empty, ["kept-decode", "gone-decode"])) == {"kept-decode"}
        assert home.collect(20 * DAY_S).deleted == (0, 0)

    def test_a_collection_that_is_killed_anywhere_continues(self, empty: Database, tmp_path: Path) -> None:
        for effect in range(1, 200):
            home = Home(empty, tmp_path / str(effect))
            kept = home.version("kept")
            home.version("gone")
            datasets.remove_versions(empty, "gone", None)
            home.collect(2 * DAY_S)
            killer = Killer(left=effect)
            with suppress(InterruptedError):
                home.collect(10 * DAY_S, killer=killer)
            if killer.left > 0:
                assert effect > 20
                return
            home.collect(10.1 * DAY_S)
            assert home.stored() == kept
            home.clear()
        raise AssertionError("a collection has fewer effects")

    def test_results_keep_a_condemned_blob(self, empty: Database, tmp_path: Path) -> None:
        home = Home(empty, tmp_path)
        home.version("kept")
        (stray,) = home.lakehouse.put_parts([b"stray"])
        home.collect(0.0)
        assert home.collect(2 * DAY_S).condemned[0] == 1
        again = Results(version_id=1, artifacts=[stray])
        results.commit(empty, again, finished=None, owner="w", now_s=9 * DAY_S)
        assert home.collect(10 * DAY_S).deleted == (0, 0)
        assert stray.blob in home.stored()
        deleting = update(schema.blobs).where(schema.blobs.c.digest == stray.blob).values(state=blobs.DELETING)
        empty.write(lambda connection: connection.execute(deleting))
        for call in (
            partial(results.commit, empty, again, finished=None, owner="w", now_s=1.0),
            partial(blobs.hold, empty, {stray.blob: 5}, now_s=1.0),
        ):
            with pytest.raises(BlobDeletingError, match="put it again"):
                call()
        with pytest.raises(BlobDeletingError, match="recompute it"):
            results.commit(empty, Results(version_id=1, reused=["gone"]), finished=None, owner="w", now_s=1.0)

    def test_a_plan_that_cannot_be_read_stops_the_collection(self, empty: Database, tmp_path: Path) -> None:
        home = Home(empty, tmp_path)
        stray = home.lakehouse.put_blob(b"stray")
        pinned = home.lakehouse.put_blob(b"pinned")
        home.store.put("plans/job.json", canonical_json({"tokenizer": pinned}))
        home.collect(0.0)
        home.collect(2 * DAY_S)
        home.store.put("plans/torn.json", b'{"tokenizer": ')
        with pytest.raises(CollectionStoppedError, match=r"plans/torn\.json"):
            home.collect(20 * DAY_S)
        assert home.stored() == {stray, pinned}
        home.store.delete("plans/torn.json")
        home.collect(20 * DAY_S)
        assert home.stored() == {pinned}

    def test_a_lost_registry_is_rebuilt_from_the_store(self, empty: Database, tmp_path: Path) -> None:
        home = Home(empty, tmp_path)
        home.version("sealed")
        datasets.add_version(
            empty,
            name="open",
            source={},
            digest="o",
            records=1,
            now_s=1.0,
            store_first=rebuild.store_document(home.store),
        )
        version = datasets.find_version(empty, "sealed")
        before = home.rows(version.id)
        assert rebuild.seal_samples(empty, home.store, version, home.lakehouse.get_parts) == 2
        home.clear_rows()
        home.store.put("versions/torn/1.json", b"{")
        report = rebuild.rebuild_registry(empty, home.store)
        assert (report.versions, report.samples, report.unsealed) == (2, 2 + 2, ["open@1"])
        known = results.outputs_of(empty, ["sealed-decode", "sealed-measure", "sealed-group", "other"])
        assert (report.actions, sorted(known)) == (3, ["sealed-decode", "sealed-group", "sealed-measure"])
        assert [note.partition(":")[0] for note in report.damaged] == ["versions/torn/1.json"]
        restored = datasets.find_version(empty, "sealed@1")
        assert dataclasses.replace(restored, id=version.id) == version
        assert home.rows(restored.id) == before
        assert rebuild.rebuild_registry(empty, home.store) == report
        home.store.put("versions/sealed/1/samples-000000000000.jsonl", b"{}\n")
        assert any("samples-0" in note for note in rebuild.rebuild_registry(empty, home.store).damaged)


class Home:
    """A registry with an object store."""

    def __init__(self, database: Database, folder: Path) -> None:
        self.database = database
        self.store: ObjectStore = open_store(f"file://{folder}/objects")
        self.lakehouse = Lakehouse(self.store)

    def version(self, name: str) -> set[str]:
        """Add a version of two samples with a raw image and what was made of it; return its blobs."""
        put = rebuild.store_document(self.store)
        version = datasets.add_version(
            self.database, name=name, source={}, digest=name, records=2, now_s=0.0, store_first=put
        )
        places: list[Artifact] = []
        for part in (f"{name} raw", f"{name} pixels"):
            places += self.lakehouse.put_parts([part.encode()])
        raw, pixels = (place.digest for place in places)
        records = [canonical_json({"image": raw, "at": at, "of": name}) for at in range(2)]
        decoded = canonical_json({"pixels": pixels})
        stored = [self.lakehouse.put_parts([part])[0] for part in (*records, decoded)]
        measured = Action(key=f"{name}-measure", operation="m", inputs=(stored[2].digest,), output="m", value='{"w":1}')
        inputs = (stored[0].digest,)
        made = Action(key=f"{name}-decode", operation="decode", inputs=inputs, output=stored[2].digest)
        rows = [SampleRow(ordinal=at, sample_id=f"s{at}", record=stored[at].digest) for at in range(2)]
        shard = self.lakehouse.put_blob(f"{name} shard".encode())
        group = self.lakehouse.put_blob(f"{name} group".encode())
        grouped = Action(key=f"{name}-group", operation="index", inputs=(name,), output=group)
        content = canonical_json({"shards": [shard]})
        manifest = self.lakehouse.put_blob(content)
        index = IndexRow(key=f"{name} index", version_id=version.id, manifest=manifest, samples=2, tokens=9)
        made_here = Results(
            version_id=version.id,
            samples=rows,
            artifacts=[*places, *stored],
            actions=[made, measured, grouped],
            indexes=[index],
            blobs={shard: len(name) + 6, group: len(name) + 6, manifest: len(content)},
        )
        store_list(self.store, version, made_here)
        results.commit(
            self.database,
            made_here,
            finished=self._item(name),
            owner="w",
            now_s=0.0,
        )
        return {shard, manifest, group} | {place.blob for place in (*places, *stored)}

    def _item(self, name: str) -> WorkItem:
        one = item(0, flow=name)
        work_items.add(self.database, [one])
        return one

    def collect(self, now_s: float, *, dry_run: bool = False, killer: Killer | None = None) -> CollectionReport:
        database, store = self.database, self.store
        if killer is not None:
            database, store = killer.around(database, "write"), killer.around(store, "list", "delete")
        read = self.lakehouse.get_parts
        return collect(database, store, read, now_s=lambda: now_s, grace_s=WEEK_S, dry_run=dry_run)

    def stored(self) -> set[str]:
        return {info.key.rpartition("/")[2] for info in self.store.list(collection.BLOBS)}

    def rows(self, version_id: int) -> Any:
        samples = results.samples_between(self.database, version_id, first=0, count=9)
        return samples, results.places_of(self.database, [row.record for row in samples])

    def clear_rows(self) -> None:
        tables = reversed(schema.metadata.sorted_tables)
        self.database.write(lambda connection: [connection.execute(delete(table)) for table in tables])

    def clear(self) -> None:
        self.clear_rows()
        for digest in self.stored():
            self.store.delete(blob_key(digest))


class Killer:
    """Stops everything at the n-th effect: before it, after it, in turn."""

    def __init__(self, left: int) -> None:
        self.left = left
        self._after = left % 2 == 0

    def around(self, wrapped: Any, *effects: str) -> Any:
        """Return an object that counts calls of some methods and passes all on."""
        calls = {name: partial(self._call, getattr(wrapped, name)) for name in effects}
        return SimpleNamespace(
            **{name: getattr(wrapped, name) for name in ("read", "get") if hasattr(wrapped, name)} | calls
        )

    def _call(self, method: Callable[..., Any], *arguments: Any) -> Any:
        self.left -= 1
        if self.left == 0 and not self._after:
            raise InterruptedError
        result = method(*arguments)
        if self.left == 0:
            raise InterruptedError
        return result


def add(database: Database, name: str, digest: str) -> datasets.DatasetVersion:
    return datasets.add_version(database, name=name, source={}, digest=digest, records=1, now_s=1.0)


def fill(database: Database, version: datasets.DatasetVersion, rows: list[tuple[str, str]]) -> None:
    one = item(0, flow=f"fill{version.id}")
    work_items.add(database, [one])
    samples = [SampleRow(ordinal=at, sample_id=name, record=record) for at, (name, record) in enumerate(rows)]
    made = Results(version_id=version.id, samples=samples)
    assert results.commit(database, made, finished=one, owner="w", now_s=1.0)


def cut(rows: Iterator[derived.Row], count: int) -> Iterator[derived.Row]:
    """Yield rows, and stop with an error at one."""
    for at, row in enumerate(rows):
        if at == count:
            raise InterruptedError
        yield row
