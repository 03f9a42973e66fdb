"""What users see of a large registry: bounded pages by a bounded number of queries."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from sqlalchemy import Connection, event, insert

from polyreme_api.errors import NotFoundError
from polyreme_datahub import dataset_views, hub
from polyreme_datahub.named_versions import check_spec
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry import schema
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.progress import INDEXES_MAX
from polyreme_datahub.runner.outcomes import SHOWN_MAX
from polyreme_datahub.sources.digits import sample_sources
from tests.unit.datahub.jobs import Home, make_spec

VERSIONS, LETTERS, INDEXES = 1500, 3000, 150


@contextmanager
def queries(database: Database) -> Iterator[list[str]]:
    seen: list[str] = []

    def note(_connection: Connection, _cursor: object, statement: str, *_rest: object) -> None:
        if not statement.startswith(("BEGIN", "PRAGMA")):
            seen.append(statement)

    event.listen(database._engine, "before_cursor_execute", note)
    yield seen
    event.remove(database._engine, "before_cursor_execute", note)


@pytest.fixture
def database(tmp_path: Path) -> Database:
    """A registry of many datasets, one of them with many versions, letters, indexes and tombstones."""
    database = open_database(Home(tmp_path).registry)

    def fill(connection: Connection) -> None:
        versions = [("one", number) for number in range(1, VERSIONS + 1)]
        versions += [(f"set-{number:05d}", 1) for number in range(VERSIONS)]
        rows = [
            {"name": name, "number": number, "source": '{"kind":"jsonl"}', "digest": f"{number}", "records": LETTERS}
            for name, number in versions
        ]
        connection.execute(insert(schema.versions), [{**row, "created_s": 1.0} for row in rows])
        letter = {"version_id": VERSIONS, "sample_id": "s", "rule": "r", "error": "e", "created_s": 1.0}
        letters = [{**letter, "operation": "ingest", "key": f"{at}", "ordinal": at} for at in range(LETTERS)]
        connection.execute(insert(schema.dead_letters), letters)
        index = {"version_id": VERSIONS, "samples": 1, "tokens": 1}
        indexes = [{**index, "key": f"{at}", "manifest": f"m{at}", "created_s": at} for at in range(INDEXES)]
        connection.execute(insert(schema.indexes), indexes)
        stone = {"sample_id": "s", "error": "e"}
        stones = [{**stone, "index_digest": f"m{at}", "ordinal": n} for at in range(INDEXES) for n in range(20)]
        connection.execute(insert(schema.tombstones), stones)

    database.write(fill)
    return database


def test_one_version_is_shown_by_few_queries_in_bounded_pages(database: Database, tmp_path: Path) -> None:
    with queries(database) as seen:
        details = dataset_views.details(database, open_store(tmp_path.as_uri()), "one", now_s=1.0)
    assert len(seen) <= 10
    assert details.version.number == VERSIONS
    assert (details.dead, len(details.dead_letters)) == (LETTERS, SHOWN_MAX)
    assert [letter.ordinal for letter in details.dead_letters] == list(range(SHOWN_MAX))
    assert len(details.indexes) == INDEXES_MAX
    assert details.indexes[-1].manifest == f"m{INDEXES - 1}"
    assert len(details.tombstones) == dataset_views.TOMBSTONES_MAX
    assert (len(details.versions), details.versions[-1]) == (1000, VERSIONS)


def test_datasets_are_listed_page_by_page_with_one_query_each(database: Database) -> None:
    names: list[str] = []
    while True:
        with queries(database) as seen:
            page = dataset_views.summaries(database, after=names[-1] if names else "", count_max=400)
        assert len(seen) == 1
        assert len(page) <= 400
        if not page:
            break
        names += [summary.name for summary in page]
    assert names == sorted(set(names))
    assert len(names) == VERSIONS + 1 + len(sample_sources())
    assert next(s for s in dataset_views.summaries(database) if s.name == "one").versions == VERSIONS


@pytest.mark.usefixtures("database")
def test_all_datasets_are_listed_however_many_there_are(tmp_path: Path) -> None:
    assert len(hub.list_datasets(Home(tmp_path).registry)) == VERSIONS + 1 + len(sample_sources())


def test_a_job_is_checked_by_one_or_two_queries_a_dataset(database: Database) -> None:
    with queries(database) as seen:
        check_spec(database, make_spec([f"set-{number:05d}@1" for number in range(10)]))
    assert len(seen) == 20


@pytest.mark.parametrize("number", ["", "x", "0", "-1", "1.0", "9" * 30, "2"])
def test_what_is_no_version_is_not_found(database: Database, tmp_path: Path, number: str) -> None:
    with pytest.raises(NotFoundError, match="no dataset version"):
        hub.show_dataset(Home(tmp_path).registry, Home(tmp_path).objects, f"set-00000@{number}")
