"""Flows over real topics: worker processes share the work, and one that is killed costs nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from polyreme_api.environment import DATABASE_URL, OBJECTS_URL, TOPICS_URL
from polyreme_datahub import hub
from polyreme_datahub.processing import ProcessReport
from tests.unit.datahub.jobs import Home, digits, make_spec, picture, record, write_jsonl

pytestmark = [pytest.mark.services, pytest.mark.slow]
ROOT = Path(__file__).parents[2]
PAGES = 1500


@contextmanager
def worker(home: Path, variables: dict[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process of its own."""
    call = [sys.executable, "-m", "polyreme.main", "--home", str(home), "data", "worker", "--workers", "1"]
    process = subprocess.Popen(call, env={**os.environ, **variables}, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        process.kill()
        process.wait()


def facts(report: ProcessReport) -> list[tuple[str, int, int, str, int]]:
    return [
        (part.reference, part.samples, part.tokens, part.manifest, len(part.dead_letters)) for part in report.datasets
    ]


def test_workers_that_are_killed_cost_nothing_and_the_manifest_is_that_of_one_process(
    database: str, pulsar_server: str, bucket: str, tmp_path: Path
) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    for number in range(40):
        (folder / f"{number}.jpg").write_bytes(picture(120 + number, 90, kind="JPEG", seed=number))
    (folder / "cut.jpg").write_bytes(picture(200, 150, kind="JPEG")[:900])
    lines = [record(f"r{number}", [f"{number}.jpg"]) for number in range(40)] + [record("cut", ["cut.jpg"])]
    files = write_jsonl(folder, lines)
    spec = make_spec(["two", "files"], sequence_tokens=128)

    alone = Home(tmp_path / "alone")
    alone.folder.mkdir()
    alone.register("two", digits(2, pages=PAGES))
    alone.register("files", files)
    expected = facts(alone.process(spec))

    objects = f"{bucket}/objects"
    hub.register(database, objects, "two", digits(2, pages=PAGES))
    hub.register(database, objects, "files", files)
    variables = {DATABASE_URL: database, TOPICS_URL: pulsar_server, OBJECTS_URL: objects}
    with worker(tmp_path / "w1", variables) as first, worker(tmp_path / "w2", variables) as second:
        killed: list[int] = []

        def progress(_: object) -> None:
            if not killed:
                killed.append(first.pid)
                first.send_signal(signal.SIGKILL)

        report = hub.process(
            spec,
            registry_url=database,
            objects_url=objects,
            topics_url=pulsar_server,
            progress=progress,
            workers=1,
        )
        assert second.poll() is None
    assert killed
    assert facts(report) == expected
    again = hub.process(spec, registry_url=database, objects_url=objects, topics_url=pulsar_server)
    assert {count.misses for count in again.operations} == {0}
