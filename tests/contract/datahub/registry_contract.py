"""What every registry promises; the same tests run on SQLite and on a real PostgreSQL."""

from __future__ import annotations

import contextlib
import itertools
import os
import random
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from sqlalchemy import Connection, Float, QueuePool, inspect, text
from sqlalchemy.exc import TimeoutError as NoFreeConnectionError

from polyreme_api.errors import NotFoundError
from polyreme_datahub import hub
from polyreme_datahub.errors import RegistryFailedError
from polyreme_datahub.registry import datasets, lineage, progress, results, schema, work_items
from polyreme_datahub.registry.engine import open_database
from polyreme_datahub.registry.migrate import RegistryNewerError, alembic_config
from polyreme_datahub.registry.rows import Action, OperationCount, Output, Results, SampleRow
from polyreme_datahub.registry.work_items import WorkItem
from tests.unit.datahub.jobs import Home, digits, make_spec, picture, record, write_jsonl

SCHEMA = Path(__file__).with_name("schema.txt")
PARTITION = re.compile(r"(samples|ix_samples|samples_pkey).*_[0-9]{2}.*")
"""Parts of a table on PostgreSQL; the table itself is the same as elsewhere."""
ROOT = Path(__file__).parents[3]
KILLS = 6


FIRST_ROWS: dict[str, dict[str, object]] = {
    "versions": {
        "id": 1,
        "name": "a",
        "number": 1,
        "source": "{}",
        "digest": "x",
        "records": 9,
        "created_s": 1.5,
    },
    "samples": {"version_id": 1, "ordinal": 3, "sample_id": "s", "record": "r"},
    "artifacts": {"digest": "out", "blob": "b", "start": 0, "length": 7},
    "actions": {"key": "k", "operation": "decode", "input": "in", "output": "out"},
    "dead_letters": {
        "version_id": 1,
        "key": "d",
        "stage": "decode",
        "ordinal": 4,
        "sample_id": "t",
        "rule": "r",
        "error": "e",
        "created_s": 1.5,
    },
    "messages": {"key": "p/decode/1/0", "pipeline": "p", "topic": "decode", "body": "{}", "done": 0},
    "tries": {"key": "p/decode/1/0", "count": 1, "due_s": 2.5, "error": "e"},
    "tombstones": {"index_digest": "i", "ordinal": 3, "sample_id": "s", "error": "e"},
    "indexes": {"key": "i", "version_id": 1, "manifest": "m", "samples": 1, "tokens": 2, "created_s": 1.5},
    "statistics": {"version_id": 1, "stage": "decode", "hits": 1, "misses": 2, "dead": 3},
}
"""A row of each table of revision 0001."""


class RegistryContract:
    """Subclasses give ``url``."""

    @pytest.fixture
    def url(self) -> str:
        raise NotImplementedError

    def test_migrations_make_exactly_the_schema(self, url: str) -> None:
        database = open_database(url)

        def compare(connection: Connection) -> list[object]:
            options = {"include_object": lambda _object, name, *_rest: not PARTITION.fullmatch(name)}
            return list(compare_metadata(MigrationContext.configure(connection, opts=options), schema.metadata))

        assert database.read(compare) == []
        database.close()

    def test_the_schema_is_the_one_on_record(self, url: str) -> None:
        database = open_database(url)
        assert database.read(dump_schema) == SCHEMA.read_text("utf-8")
        database.close()

    def test_a_downgrade_takes_everything_back_and_an_upgrade_brings_it_again(self, url: str) -> None:
        database = open_database(url)
        database.write(lambda connection: command.downgrade(alembic_config(connection), "base"))
        assert database.read(dump_schema) == ""
        database.close()
        database = open_database(url)
        assert database.read(dump_schema) == SCHEMA.read_text("utf-8")
        database.close()

    def test_a_filled_registry_of_the_first_schema_keeps_its_rows_up_and_down(self, url: str) -> None:
        database = open_database(url)
        database.write(lambda connection: command.downgrade(alembic_config(connection), "0001"))

        def rows(connection: Connection) -> dict[str, list[dict[str, object]]]:
            return {
                table: [dict(row) for row in connection.execute(text(f"SELECT * FROM {table}")).mappings()]
                for table in FIRST_ROWS
            }

        def fill(connection: Connection) -> None:
            for table, row in FIRST_ROWS.items():
                names = ", ".join(row)
                connection.execute(text(f"INSERT INTO {table} ({names}) VALUES (:{names.replace(', ', ', :')})"), row)

        database.write(fill)
        database.close()
        database = open_database(url)
        assert results.samples_between(database, 1, first=0, count=9) == [
            SampleRow(ordinal=3, sample_id="s", record="r")
        ]
        assert results.outputs_of(database, ["k"]) == {"k": Output("out", None)}
        assert lineage.lineage_of(database, "out", count_max=9).raw == ["in"]
        assert results.letters_between(database, 1, first=0, count=9)[0].operation == "decode"
        assert progress.statistics_of(database, 1)["decode"] == OperationCount(
            operation="decode", hits=1, misses=2, dead=3
        )
        results.put_action(database, Action(key="new", operation="o", inputs=("in",), output="x", value="1"))
        database.write(lambda connection: command.downgrade(alembic_config(connection), "0001"))
        assert database.read(rows) == {table: [row] for table, row in FIRST_ROWS.items()}
        database.close()

    def test_a_connection_that_breaks_on_its_way_back_costs_a_try_and_no_place_in_the_pool(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        database = open_database(url)
        dialect, waits = database._engine.dialect, list[float]()
        failures: Iterator[bool] = iter([True, True])
        reset = dialect.reset_isolation_level

        def fail(connection: Any) -> None:
            if next(failures, False):
                raise dialect.loaded_dbapi.OperationalError("server closed the connection unexpectedly\n\tbecause")
            reset(connection)

        monkeypatch.setattr(dialect, "reset_isolation_level", fail)
        monkeypatch.setattr(database, "_sleep", waits.append)
        assert database.read(lambda connection: connection.execute(text("SELECT 7")).scalar()) == 7
        assert len(waits) == 2
        pool = database._engine.pool
        assert isinstance(pool, QueuePool)
        assert pool.checkedout() == 0
        failures = itertools.repeat(True)
        with pytest.raises(RegistryFailedError, match=r"after (6|20) tries: server closed the connection"):
            database.read(lambda connection: connection.execute(text("SELECT 7")).scalar())
        database.close()

    def test_a_thread_that_finds_no_free_connection_tries_again(
        self, url: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A server that does not answer keeps the connections of a pool with their threads."""
        database = open_database(url)
        pool = database._engine.pool
        assert isinstance(pool, QueuePool)
        monkeypatch.setattr(pool, "_timeout", 0)
        held: list[Connection] = []
        with contextlib.suppress(NoFreeConnectionError):
            while True:
                held.append(database._engine.connect())
        monkeypatch.setattr(database, "_sleep", lambda _: held.pop().close())
        kept = len(held)
        assert database.read(lambda connection: connection.execute(text("SELECT 7")).scalar()) == 7
        assert len(held) == kept - 1
        for connection in held:
            connection.close()
        database.close()

    def test_a_registry_of_a_newer_release_is_refused(self, url: str) -> None:
        database = open_database(url)
        database.write(lambda connection: connection.execute(text("UPDATE alembic_version SET version_num = '9999'")))
        database.close()
        with pytest.raises(RegistryNewerError, match="newer release"):
            open_database(url)

    def test_many_may_migrate_at_once(self, url: str) -> None:
        failures: list[Exception] = []

        def open_it() -> None:
            try:
                open_database(url).close()
            except Exception as error:  # noqa: BLE001 - raised by the test's own thread
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

    def test_the_late_twin_of_an_ingest_brings_no_doubled_id_back(self, url: str) -> None:
        database = open_database(url)
        version = datasets.add_version(database, name="a", source={}, digest="x", records=2, now_s=1.0)
        item = WorkItem(key="f/compose/1/0", flow="f", operation="compose", version_id=version.id, first=0, count=2)
        work_items.add(database, [item])
        rows = [SampleRow(ordinal=at, sample_id="same", record="r") for at in range(2)]
        made = Results(version_id=version.id, samples=rows)
        assert results.commit(database, made, finished=item, owner="one", now_s=1.0)
        assert progress.reject_duplicates(database, version.id, now_s=2.0) == 1
        assert not results.commit(database, made, finished=item, owner="two", now_s=3.0)
        assert not results.commit(database, made, finished=None, within=item, owner="two", now_s=3.0)
        assert [row.ordinal for row in results.samples_between(database, version.id, first=0, count=9)] == [0]
        database.close()

    @pytest.mark.slow
    def test_killed_again_and_again_it_ends_with_the_same_index(self, url: str, tmp_path: Path) -> None:
        folder = tmp_path / "set"
        folder.mkdir()
        (folder / "good.png").write_bytes(picture(90, 60))
        (folder / "cut.jpg").write_bytes(picture(200, 150, kind="JPEG")[:900])
        files = write_jsonl(folder, [record("a", ["good.png"]), record("b", ["cut.jpg"]), "{", record("c")])
        homes = [Home(tmp_path / "whole"), Home(tmp_path / "doomed", url)]
        for home in homes:
            home.folder.mkdir()
            home.register("two", digits(2, pages=700))
            home.register("files", files)
        expected = run_until(homes[0], 0)
        assert expected.returncode == 0, expected.stderr
        assert expected.stdout.startswith("700:")
        generator = random.Random(29)
        killed = [run_until(homes[1], generator.randint(1, 36)).returncode == -signal.SIGKILL for _ in range(KILLS)]
        assert sum(killed) >= KILLS - 2
        assert run_until(homes[1], 0).stdout == expected.stdout

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
            except Exception as error:  # noqa: BLE001 - raised by the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=run) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(set(manifests)) == 1
        again = hub.process(spec, registry_url=url, objects_url=objects)
        assert {count.misses for count in again.operations} == {0}
        assert again.datasets[0].samples == 600


def run_until(home: Home, effect: int) -> subprocess.CompletedProcess[str]:
    call = [sys.executable, "-m", "tests.unit.datahub.crashing", str(home.folder), str(effect), home.registry]
    # PYTHONSAFEPATH takes the working folder off the path.
    path = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(call, capture_output=True, text=True, cwd=ROOT, env=path, check=False, timeout=120)


def dump_schema(connection: Connection) -> str:
    """Write tables, columns, keys and indexes as text, the same for every database."""
    seen = inspect(connection)
    lines = []
    names = {name for name in seen.get_table_names() if not PARTITION.fullmatch(name)}
    for table in sorted(names - {"alembic_version"}):
        lines.append(f"{table} key {seen.get_pk_constraint(table)['constrained_columns']}")
        for column in seen.get_columns(table):
            kind = "FLOAT" if isinstance(column["type"], Float) else str(column["type"])
            lines.append(f"  {column['name']} {kind}{'' if column['nullable'] else ' not null'}")
        uniques = seen.get_unique_constraints(table)
        owned = {one["name"] for one in uniques}
        indexes = [one for one in seen.get_indexes(table) if one["name"] not in owned]
        lines += sorted(f"  unique {one['name']} {one['column_names']}" for one in uniques)
        lines += sorted(f"  index {one['name']} {one['column_names']}" for one in indexes)
        lines += [f"  {key['constrained_columns']} -> {key['referred_table']}" for key in seen.get_foreign_keys(table)]
    return "".join(f"{line}\n" for line in lines)
