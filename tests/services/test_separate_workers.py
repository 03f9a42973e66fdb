"""A controller with separate workers on real servers: it plans, waits and seals, and they do the work."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import create_engine, text

from polyreme.run_files.paths import Home
from polyreme_api.environment import DATABASE_URL, OBJECTS_URL, TOPICS_URL
from polyreme_api.job import TrainingJob, parse_job
from polyreme_datahub import hub
from polyreme_datahub.objects import open_store
from polyreme_datahub.registry.work_items import DONE
from polyreme_datahub_service.preparation import LocalPreparation
from tests.services.test_flows_on_servers import worker
from tests.unit.datahub.jobs import digits
from tests.unit.operator.operator_scenes import job_manifest

pytestmark = [pytest.mark.services, pytest.mark.slow]
PAGES = 1500
LOOK_EVERY_S, LOOKS_MAX = 0.02, 6000
DATASET = "own/digits"


def job() -> TrainingJob:
    data = {"sources": [{"name": "a", "dataset": DATASET}], "sequenceTokens": 128, "tokenizer": {"vocabulary": 304}}
    return parse_job(job_manifest(data=data))


def manifests(objects_url: str, plan: str) -> bytes:
    """The plan object: it names the manifests, and so every byte of the data, by their digests."""
    return bytes(open_store(objects_url).get(plan))


def owners(database: str) -> dict[str, set[int]]:
    """Which processes did the items of each stage."""
    engine = create_engine(database)
    with engine.connect() as connection:
        rows = connection.execute(text("SELECT stage, owner FROM work WHERE state = :done"), {"done": DONE}).all()
    engine.dispose()
    found: dict[str, set[int]] = {}
    for stage, owner in rows:
        host, pid, _, _ = owner.split("/")
        assert host.startswith(f"{socket.gethostname()}.")
        found.setdefault(stage, set()).add(int(pid))
    return found


def part_done(line: Mapping[str, Any]) -> bool:
    """Whether a line of progress shows that workers are in the middle of a stage."""
    return line.get("stage") == "compose" and 0 < line.get("done", 0) < line["total"]


def halt_when_begun(process: subprocess.Popen[bytes], database: str) -> None:
    """Halt a worker once it has done a part of its stage, so that the controller finds it there however fast it is."""
    engine = create_engine(database)
    with engine.connect().execution_options(isolation_level="AUTOCOMMIT") as connection:
        for _ in range(LOOKS_MAX):
            query = text("SELECT count(*) FROM work WHERE stage = 'compose' AND state = :done")
            if connection.execute(query, {"done": DONE}).scalar_one():
                process.send_signal(signal.SIGSTOP)
                break
            time.sleep(LOOK_EVERY_S)
    engine.dispose()


def test_the_controller_prepares_nothing_itself_and_a_killed_worker_costs_nothing(
    database: str, pulsar_server: str, bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alone = Home(path=tmp_path / "alone")
    alone.prepare_data()
    hub.register(alone.registry_url, alone.objects_url, DATASET, digits(2, pages=PAGES))
    expected = asyncio.run(LocalPreparation(alone, scope="alone").prepare(job(), lambda _line: None))

    variables = {DATABASE_URL: database, TOPICS_URL: pulsar_server, OBJECTS_URL: f"{bucket}/objects"}
    hub.register(database, variables[OBJECTS_URL], DATASET, digits(2, pages=PAGES))
    alone_plan = manifests(alone.objects_url, expected.plan)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    lines: list[Mapping[str, Any]] = []
    with contextlib.ExitStack() as workers_run:
        first = workers_run.enter_context(worker(tmp_path / "w1", variables))
        started: list[subprocess.Popen[bytes]] = []

        def progress(line: Mapping[str, Any]) -> None:
            lines.append(line)
            if part_done(line) and first.returncode is None:
                first.send_signal(signal.SIGKILL)
                first.wait()
                started.append(workers_run.enter_context(worker(tmp_path / "w2", variables)))

        halting = threading.Thread(target=halt_when_begun, args=(first, database))
        halting.start()
        controller = LocalPreparation(Home(path=tmp_path / "controller"), scope="here", only_seals=True)
        made = asyncio.run(controller.prepare(job(), progress))
        halting.join()
        assert first.returncode == -signal.SIGKILL, lines
        (second,) = started
        assert second.poll() is None
        workers = {first.pid, second.pid}
    assert made == expected
    assert manifests(variables[OBJECTS_URL], made.plan) == alone_plan
    found = owners(database)
    assert found["compose"] | found["tokenize"] <= workers
    assert not found["index"] & workers, "the controller seals"
    assert any(part_done(line) for line in lines), "the controller shows how far the workers are"
    assert not (tmp_path / "controller" / "data" / "objects").exists()
