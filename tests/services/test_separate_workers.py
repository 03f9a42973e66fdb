"""A controller with separate workers on real servers: it plans, waits and seals, and they do the work."""

from __future__ import annotations

import asyncio
import signal
import socket
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
    with worker(tmp_path / "w1", variables) as first, worker(tmp_path / "w2", variables) as second:

        def progress(line: Mapping[str, Any]) -> None:
            lines.append(line)
            if line.get("done") and first.returncode is None:
                first.send_signal(signal.SIGKILL)
                first.wait()

        controller = LocalPreparation(Home(path=tmp_path / "controller"), scope="here", only_seals=True)
        made = asyncio.run(controller.prepare(job(), progress))
        assert first.returncode == -signal.SIGKILL
        assert second.poll() is None
        workers = {first.pid, second.pid}
    assert made == expected
    assert manifests(variables[OBJECTS_URL], made.plan) == alone_plan
    found = owners(database)
    assert found["compose"] | found["tokenize"] <= workers
    assert not found["index"] & workers, "the controller seals"
    assert any(0 < line.get("done", 0) < line["total"] for line in lines if line.get("stage") == "compose")
    assert not (tmp_path / "controller" / "data" / "objects").exists()
