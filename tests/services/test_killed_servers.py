"""The servers that tests kill come back on the same address with what they had."""

from __future__ import annotations

from pathlib import Path

import psutil
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError

from polyreme_datahub.objects import open_store
from tools.cluster.servers import Servers
from tools.s3.server import Buckets
from tools.services.guard import held
from tools.services.postgresql import Postgresql

pytestmark = [pytest.mark.services, pytest.mark.slow]

ENDED_S_MAX = 60.0


def kill(servers: Servers) -> None:
    """Kill the server; its own processes notice that and end, on busy cores some time later."""
    (server,) = servers.all
    process = psutil.Process(server.pid)
    own = process.children(recursive=True)
    process.kill()
    psutil.wait_procs(own, timeout=ENDED_S_MAX)
    servers.stop()


def test_a_killed_postgresql_has_what_was_committed(tmp_path: Path) -> None:
    with held(tmp_path) as servers:
        postgresql = Postgresql(tmp_path, servers)
        postgresql.start()
        url = postgresql.wait()["POLYREME_DATABASE_URL"]
        engine = create_engine(url, pool_pre_ping=True)
        with engine.begin() as connection:
            connection.execute(text("CREATE TABLE kept AS SELECT 7 AS value"))
        kill(servers)
        with pytest.raises(OperationalError), engine.connect():
            pass
        postgresql.start()
        assert postgresql.wait()["POLYREME_DATABASE_URL"] == url
        with engine.connect() as connection:
            assert connection.execute(text("SELECT value FROM kept")).scalar_one() == 7
        engine.dispose()
        data = (tmp_path / "postgresql").resolve()
        assert data.exists()
    assert not data.exists()


def test_a_killed_s3_server_has_its_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held(tmp_path) as servers:
        buckets = Buckets(tmp_path / "buckets", servers, ("one",))
        buckets.start()
        variables = buckets.wait()
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        open_store("s3://one").put("a/b", b"kept")
        kill(servers)
        buckets.start()
        assert buckets.wait() == variables
        assert open_store("s3://one").get("a/b") == b"kept"
