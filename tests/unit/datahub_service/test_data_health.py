"""Servers that are wrong or away: the controller and its workers stay, say so in one sentence, and work again."""

import asyncio
import json
import logging
import os
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from polyreme_api.environment import DATABASE_URL, OBJECTS_URL, TOPICS_URL
from polyreme_api.errors import InvalidConfigError, PolyremeError
from polyreme_datahub_service.controller import DataController
from polyreme_datahub_service.health import LOG_EVERY_S, RETRY_MAX_S, GuardedPreparation, Health
from tests.unit.datahub_service.test_data_controller import TAKES_S, Pipeline, gated
from tools.cluster.servers import free_ports

WRONG = InvalidConfigError("no registry for 'mysql://db/x': expected postgresql+psycopg2://host/database")
PATIENCE_S = 60.0


class Servers:
    """Stands for the servers: they answer, or fail as the test sets."""

    def __init__(self, error: PolyremeError | None = None) -> None:
        self.error = error

    def check(self) -> None:
        if self.error is not None:
            raise self.error


def test_a_job_waits_with_the_sentence_and_is_prepared_as_soon_as_the_servers_answer() -> None:
    stage, pipeline, servers = gated(), Pipeline(), Servers(WRONG)
    health = Health(servers, steady_s=stage.clock.steady_s)

    async def story() -> None:
        stage.add_job("j")
        controller = DataController(stage.cluster, GuardedPreparation(pipeline, health), stage.clock)
        health.check()
        task = asyncio.ensure_future(controller.run())
        try:
            await asyncio.sleep(600.0)
            ready = stage.condition("j", "DataReady")
            assert (ready["status"], ready["reason"]) == ("False", "ProcessingFailed"), "no verdict on the data"
            assert ready["message"].startswith(str(WRONG))
            assert pipeline.began == []
            servers.error = None
            assert health.check()
            controller.retry_now()
            await asyncio.sleep(TAKES_S + 5.0)
            assert stage.condition("j", "DataReady")["status"] == "True"
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)

    stage.run(story)


def test_the_same_trouble_is_logged_now_and_then_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    now_s, servers, recovered = [0.0], Servers(WRONG), []
    health = Health(servers, steady_s=lambda: now_s[0], on_recovered=lambda: recovered.append(now_s[0]))
    assert not health.ready
    with caplog.at_level(logging.INFO):
        for second in range(int(3 * LOG_EVERY_S)):
            now_s[0] = float(second)
            assert not health.check()
        assert not health.ready
        assert [record.getMessage() for record in caplog.records] == [f"not ready: {WRONG}"] * 3
        servers.error = None
        assert health.check()
        assert health.check()
    assert health.ready
    assert (len(recovered), len(caplog.records)) == (1, 4)


def test_checks_go_on_until_they_are_stopped() -> None:
    servers, stopped = Servers(WRONG), threading.Event()
    health = Health(servers, steady_s=time.monotonic)
    thread = threading.Thread(target=health.run, args=(stopped,))
    thread.start()
    health.wait_checked()
    servers.error = None
    until_s = time.monotonic() + RETRY_MAX_S
    while not health.ready and time.monotonic() < until_s:
        time.sleep(0.05)
    assert health.ready
    stopped.set()
    thread.join(PATIENCE_S)
    assert not thread.is_alive()


def ready(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
    except OSError:
        return 0


def wait_for(port: int, code: int, process: subprocess.Popen[str]) -> None:
    until_s = time.monotonic() + PATIENCE_S
    while ready(port) != code:
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < until_s, f"never {code}"
        time.sleep(0.1)


def test_a_worker_of_an_installation_outlives_a_wrong_registry_and_works_when_it_is_right(tmp_path: Path) -> None:
    registry, log = tmp_path / "registry.sqlite", tmp_path / "log"
    registry.write_bytes(b"this is no database at all" * 1000)
    (port,) = free_ports(1)
    variables = {
        **os.environ,
        DATABASE_URL: f"sqlite:///{registry}",
        OBJECTS_URL: (tmp_path / "objects").as_uri(),
        TOPICS_URL: "memory:",
    }
    (tmp_path / "objects").mkdir()
    command = [sys.executable, "-m", "polyreme.main", "--home", str(tmp_path / "home"), "data", "worker"]
    with log.open("w") as stderr:
        process = subprocess.Popen(
            [*command, "--metrics-address", f"127.0.0.1:{port}"], env=variables, stderr=stderr, text=True
        )
        try:
            wait_for(port, 503, process)
            registry.unlink()
            wait_for(port, 200, process)
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
                assert "polyreme_datahub_ready 1.0" in answer.read().decode()
            process.terminate()
            assert process.wait(PATIENCE_S) == 0
        finally:
            process.kill()
            process.wait()
    lines = [json.loads(line) for line in log.read_text().splitlines() if line.startswith("{")]
    said = [line.get("message", line.get("msg", "")) for line in lines]
    assert sum("registry is damaged" in text for text in said) == 1, said
    assert any("answer again" in text for text in said)
