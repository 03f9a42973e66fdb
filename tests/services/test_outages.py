"""Registry, object store and bus are each away for 20 s during one run: it continues, and its data are the same."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import parse_qs, urlsplit

import pytest
from sqlalchemy import Engine, create_engine, text

from polyreme_datahub import hub
from tests.services.cut_proxy import Address, CutProxy
from tests.services.pipeline_faults import DATASET, SOCKET, plant
from tests.services.pipeline_waiter import facts
from tests.unit.datahub.jobs import make_spec

pytestmark = [pytest.mark.services, pytest.mark.slow]
AWAY_S = 20.0
APART_S = 3.0
"""Between the beginnings of two outages."""
POLL_S = 0.05
SAMPLES, BAD = 1000, 16
SPEC = make_spec([DATASET], sequence_tokens=128)


def outages(registry: CutProxy, store: CutProxy, bus: CutProxy, *, work: Engine, stopped: threading.Event) -> None:
    """From the first work on the object store is away, a little later the registry; the bus is from the beginning."""
    while not stopped.wait(POLL_S) and not actions(work):
        pass
    for proxy in (store, registry):
        proxy.away = True
        proxy.cut()
        stopped.wait(APART_S)
    stopped.wait(AWAY_S - 2 * APART_S)
    for proxy in (store, registry):
        proxy.away = False
        stopped.wait(APART_S)
    bus.away = False


def actions(work: Engine) -> int:
    with work.connect() as connection:
        return int(connection.execute(text("SELECT count(*) FROM actions")).scalar_one())


@pytest.fixture
def proxies(
    database: str, pulsar_server: str, bucket: str, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[CutProxy, CutProxy, CutProxy]]:
    """Before registry, object store and bus; the environment names that of the store."""
    socket = f"{parse_qs(urlsplit(database).query)['host'][0]}/{SOCKET}"
    servers: list[Address] = [socket, *(address(url) for url in (os.environ["AWS_ENDPOINT_URL"], pulsar_server))]
    with ExitStack() as stack:
        registry, store, bus = (stack.enter_context(CutProxy(("127.0.0.1", 0), server)) for server in servers)
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{store.address[1]}")
        yield registry, store, bus


def address(url: str) -> Address:
    parts = urlsplit(url)
    return str(parts.hostname), int(parts.port or 0)


def test_a_run_continues_though_each_server_is_away_for_20_s(
    database: str, bucket: str, proxies: tuple[CutProxy, CutProxy, CutProxy], tmp_path: Path
) -> None:
    registry, store, bus = proxies
    source, _ = plant(tmp_path / "set", SAMPLES, BAD)
    alone = f"sqlite:///{tmp_path}/registry.sqlite", f"file://{tmp_path}/objects"
    hub.register(*alone, DATASET, source)
    expected = facts(hub.process(SPEC, registry_url=alone[0], objects_url=alone[1]))

    name = urlsplit(database).path
    url = f"postgresql+psycopg2://postgres@127.0.0.1:{registry.address[1]}{name}"
    hub.register(url, bucket, DATASET, source)
    bus.away, stopped = True, threading.Event()
    direct = create_engine(database)
    settings = {"work": direct, "stopped": stopped}
    thread = threading.Thread(target=outages, args=proxies, kwargs=settings, daemon=True)
    thread.start()
    try:
        report = hub.process(
            SPEC,
            registry_url=url,
            objects_url=bucket,
            topics_url=f"pulsar://127.0.0.1:{bus.address[1]}",
            workers=2,
        )
        assert not any(proxy.away for proxy in (registry, store)), "the run ended before the outages did"
    finally:
        stopped.set()
        thread.join()
        direct.dispose()
    assert [bool(proxy.misses) for proxy in proxies] == [True] * len(proxies)
    assert facts(report) == expected
