"""Missing programs of the services are named, and servers end with the processes that hold them."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from polyreme_system.files import write_json
from tools.build_cache import BuildError
from tools.cluster.nodes.sandbox import RECORD, Sandbox
from tools.cluster.servers import Server, ServerError, Servers
from tools.services.guard import ROOT, held
from tools.services.pulsar import jars_folder
from tools.services.services import listening_address

HOLDER = """
import sys, time
from pathlib import Path
from tools.services.guard import held
with held(Path(sys.argv[1])) as servers:
    servers.start("sleeper", (sys.executable, "-c", "import time; time.sleep(60)"))
    print("holds", flush=True)
    time.sleep(60)
"""
ENDED_S_MAX = 30.0


def test_without_maven_it_says_what_to_install_or_to_name(tmp_path: Path) -> None:
    with pytest.raises(BuildError, match=r"install Maven.*PULSAR_JARS"):
        jars_folder({"XDG_CACHE_HOME": str(tmp_path), "PATH": ""})


def test_a_fetch_that_failed_leaves_no_jars_and_says_why(tmp_path: Path) -> None:
    mvn = tmp_path / "mvn"
    mvn.write_text(
        '#!/bin/sh\nfor last in "$@"; do :; done\nmkdir -p "${last#*=}"\necho no route to a mirror\nexit 1\n'
    )
    mvn.chmod(0o755)
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": f"{tmp_path}:{os.defpath}"}
    for _ in range(2):
        with pytest.raises(BuildError, match=r"mvn exited with 1[\s\S]*no route to a mirror"):
            jars_folder(environment)


@pytest.mark.parametrize(
    ("listen", "said"),
    [
        ("bridge", "LISTEN=bridge: no nodes are up in .*; run make cluster-up NODES=2 first"),
        ("0.0.0.0", "LISTEN=0.0.0.0: clients get this address; name one that they can call"),
        ("::1", "LISTEN=::1: expected bridge, or an IPv4 address of this machine"),
        ("localhost", "LISTEN=localhost: expected bridge, or an IPv4 address of this machine"),
    ],
)
def test_an_address_that_no_client_can_call_is_refused(listen: str, said: str, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match=said):
        listening_address(listen, cluster=tmp_path)


def test_services_listen_where_pods_find_this_machine(tmp_path: Path) -> None:
    write_json(tmp_path / RECORD, {"network": 7})
    assert listening_address("bridge", cluster=tmp_path) == Sandbox(tmp_path).gateway == "198.18.7.1"
    assert listening_address("192.0.2.1", cluster=tmp_path) == "192.0.2.1"


def killed_holder(folder: Path) -> Server:
    """The server of a process that held it and was killed."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(folder)], env=environment, stdout=subprocess.PIPE
    ) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"holds\n"
        holder.kill()
    (server,) = Servers(folder).all
    return server


def test_servers_stop_when_their_only_holder_is_killed(tmp_path: Path) -> None:
    server = killed_holder(tmp_path)
    until_s = time.monotonic() + ENDED_S_MAX
    while server.lives and time.monotonic() < until_s:
        time.sleep(0.05)
    assert not server.lives


def test_servers_run_until_the_last_holder_ends(tmp_path: Path) -> None:
    with held(tmp_path):
        server = killed_holder(tmp_path)
        time.sleep(0.3)  # a guard would have stopped it by now
        assert server.lives
    assert not server.lives
