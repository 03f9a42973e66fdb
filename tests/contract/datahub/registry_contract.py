"""What every registry promises; the same tests run on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection

from polyreme_api.errors import NotFoundError
from polyreme_datahub import hub
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import datasets, schema, work
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.registry.work import ActionRow, DeadLetter, Outcome, SampleRow, StageCount
from polyreme_datahub.topics.types import Message
from tests.unit.datahub.jobs import digits, make_spec

MESSAGE = Message(key="p/decode/1/0", pipeline="p", topic="decode", body="{}")


class RegistryContract:
    """Subclasses give ``url``."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def test_migrations_make_exactly_the_schema(self, url: str) -> None:
        database = open_database(url)

        def compare(connection: Connection) -> list[object]:
            return list(compare_metadata(MigrationContext.configure(connection), schema.metadata))

        assert database.read(compare) == []
        database.close()

    def test_many_may_migrate_at_once(self, url: str) -> None:
        failures: list[Exception] = []

        def open_it() -> None:
            try:
                open_database(url).close()
            except Exception as error:  # noqa: BLE001 - told by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=open_it) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def test_the_same_source_is_the_same_version_and_another_the_next(self, url: str) -> None:
        database = open_database(url)

        def add(digest: str) -> int:
            return datasets.add_version(
                database, name="a", source={"kind": "digits"}, digest=digest, records=1, now_s=1.0
            ).number

        assert [add("x"), add("y"), add("x")] == [1, 2, 1]
        assert datasets.find_version(database, "a").number == 2
        assert datasets.find_version(database, "a@1").digest == "x"
        with pytest.raises(NotFoundError, match="versions 1, 2"):
            datasets.find_version(database, "a@3")
        with pytest.raises(NotFoundError, match="did you mean 'a'"):
            datasets.find_version(database, "aa")
        database.close()

    def test_a_commit_is_whole_and_the_first_one_wins(self, url: str) -> None:
        database = open_database(url)
        version = datasets.add_version(database, name="a", source={}, digest="x", records=2, now_s=1.0)
        work.add_messages(database, [MESSAGE])

        def outcome(output: str) -> Outcome:
            return Outcome(
                version_id=version.id,
                count=StageCount(stage="decode", misses=1),
                samples=[SampleRow(ordinal=0, sample_id="s", record=output)],
                artifacts=[Artifact(digest=output, blob="b", start=0, length=1)],
                actions=[ActionRow(key="k", operation="decode", input="i", output=output)],
                dead_letters=[DeadLetter(key="d", stage="decode", ordinal=1, sample_id="t", rule="r", error=output)],
                children=[Message(key="p/compose/1/0", pipeline="p", topic="compose", body="{}")],
            )

        assert work.commit(database, MESSAGE, outcome("first"), now_s=1.0)
        assert not work.commit(database, MESSAGE, outcome("second"), now_s=2.0)
        assert work.outputs_of(database, ["k"]) == {"k": "first"}
        assert [m.topic for m in work.due_messages(database, "p", count_max=9)] == ["compose"]
        assert work.samples_between(database, version.id, first=0, count=9)[0].record == "first"
        assert work.letters_between(database, version.id, first=0, count=9)["d"].error == "first"
        assert set(work.places_of(database, ["first", "second"])) == {"first"}
        database.close()

    def test_a_try_that_the_environment_failed_does_not_count(self, url: str) -> None:
        database = open_database(url)
        assert work.begin_try(database, "k", now_s=1.0) == 1
        work.end_try(database, "k", counts=False, due_s=2.0, error="disk full")
        assert work.begin_try(database, "k", now_s=3.0) == 1
        work.end_try(database, "k", counts=True, due_s=4.0, error="bug")
        assert work.begin_try(database, "k", now_s=5.0) == 2
        assert work.dues_of(database, ["k", "other"]) == {"k": 4.0}
        work.forget_try(database, "k")
        assert work.begin_try(database, "k", now_s=6.0) == 1
        for _ in range(3):
            work.end_try(database, "k", counts=False, due_s=7.0, error="half \ud800 and nul \0")
        assert work.begin_try(database, "k", now_s=8.0) == 1
        database.close()

    @pytest.mark.slow
    def test_two_runs_at_once_on_one_home_make_one_index(self, url: str, tmp_path: Path) -> None:
        objects = f"file://{tmp_path}/objects"
        hub.register(url, objects, "two", digits(2, pages=600))
        spec = make_spec(["two"])
        manifests: list[str] = []
        failures: list[Exception] = []

        def run() -> None:
            try:
                report = hub.process(spec, registry_url=url, objects_url=objects)
                manifests.append(report.datasets[0].manifest)
            except Exception as error:  # noqa: BLE001 - told by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(set(manifests)) == 1
        again = hub.process(spec, registry_url=url, objects_url=objects)
        assert {count.misses for count in again.stages} == {0}
        assert again.datasets[0].samples == 600
