"""The tool that `make cluster-up` runs, as far as it works without Go and without a cluster."""

import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from polyreme_system.files import read_json, write_json
from tools.build_cache import BuildError
from tools.cluster import binaries
from tools.cluster.__main__ import build_parser
from tools.cluster.binaries import CONTROL_PLANE, PROGRAMS, client_path, missing_programs, program_path, programs
from tools.cluster.cluster import FOLDER, down, named_cluster, up
from tools.cluster.servers import STATE_NAME, ServerError, Servers, free_ports

SLEEP = (sys.executable, "-c", "import time; time.sleep(60)")


@pytest.fixture
def servers(tmp_path: Path) -> Iterator[Servers]:
    servers = Servers(tmp_path)
    yield servers
    servers.stop()


def test_without_go_it_says_what_to_install_or_to_name(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path), "PATH": ""}
    with pytest.raises(BuildError, match=r"install Go 1\.\d+.*KUBECONFIG.*KUBEBUILDER_ASSETS"):
        programs(environment)


def test_programs_are_taken_from_the_assets_and_then_from_the_cache(tmp_path: Path) -> None:
    assets = tmp_path / "assets"
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": "", "KUBEBUILDER_ASSETS": str(assets)}
    with pytest.raises(BuildError, match="no folder"):
        programs(environment)
    assets.mkdir()
    (assets / "etcd").touch()
    assert missing_programs(environment) == [name for name in CONTROL_PLANE if name != "etcd"]
    for name in CONTROL_PLANE:
        program_path(name, environment).parent.mkdir(parents=True, exist_ok=True)
        program_path(name, environment).touch()
    found = programs(environment)
    assert found["etcd"] == assets / "etcd"
    assert found["kubectl"].parent.name.startswith("kubectl-")


def test_each_program_is_named_after_its_own_sources_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache")}
    copy = tmp_path / "go"
    shutil.copytree(binaries.SOURCES, copy)
    monkeypatch.setattr(binaries, "SOURCES", copy)
    names = [program.name for program in PROGRAMS]

    def moved_by(path: str, text: str) -> set[str]:
        before = {name: program_path(name, environment) for name in names}
        (copy / path).write_text(text)
        return {name for name in names if program_path(name, environment) != before[name]}

    assert moved_by("kwok/stages/main.go", "package main") == {"stages"}
    assert moved_by("etcd/go.mod", "module other") == {"etcd"}
    assert moved_by("kubernetes/go.sum", "") == set()


def test_helm_takes_itself_for_a_client_of_the_kubernetes_that_it_is_built_with() -> None:
    pinned = (binaries.SOURCES / "helm/go.mod").read_text()
    assert f"\tk8s.io/client-go v0.{binaries.HELM_KUBERNETES_MINOR}." in pinned


def test_a_client_is_the_one_that_was_built_else_the_one_on_path(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path)}
    with pytest.raises(BuildError, match="no helm: `make servers` builds one"):
        client_path("helm", environment)
    (tmp_path / "helm").touch(mode=0o755)
    assert client_path("helm", environment) == tmp_path / "helm"
    built = program_path("helm", environment)
    built.parent.mkdir(parents=True)
    built.touch()
    assert client_path("helm", environment) == built


def test_a_build_that_was_killed_leaves_no_program(tmp_path: Path) -> None:
    environment = {"XDG_CACHE_HOME": str(tmp_path / "cache"), "PATH": str(tmp_path)}
    go = tmp_path / "go"
    go.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n/bin/echo torn > "$2"\nexit 1\n')
    go.chmod(0o755)
    with pytest.raises(BuildError, match="go build of etcd v3"):
        programs(environment)
    assert "etcd" in missing_programs(environment)


def test_a_kubeconfig_that_names_a_cluster_is_taken_and_nothing_is_started(tmp_path: Path) -> None:
    given = tmp_path / "config"
    environment = {"KUBECONFIG": str(given), "PATH": ""}
    with pytest.raises(BuildError, match="names no file"):
        up(tmp_path / "cluster", environment)
    given.touch()
    assert up(tmp_path / "cluster", environment) == str(given)
    assert not (tmp_path / "cluster").exists()


def test_our_own_kubeconfig_names_no_other_cluster(tmp_path: Path) -> None:
    assert named_cluster(tmp_path, {"KUBECONFIG": str(tmp_path / "kubeconfig")}) is None
    assert named_cluster(tmp_path, {"KUBECONFIG": "/elsewhere"}) == "/elsewhere"
    assert named_cluster(tmp_path, {}) is None


def test_what_was_started_is_known_to_the_next_command_and_stopped(tmp_path: Path, servers: Servers) -> None:
    server = servers.start("sleeper", SLEEP)
    again = Servers(tmp_path)
    assert again.all == [server]
    down(tmp_path)
    assert not server.lives
    assert Servers(tmp_path).all == []


def test_a_process_that_only_has_the_pid_of_a_server_is_left_alone(tmp_path: Path) -> None:
    stranger = subprocess.Popen(SLEEP)
    try:
        entry = {"name": "etcd", "pid": stranger.pid, "started_at_s": 1.0}
        write_json(tmp_path / STATE_NAME, {"ready": True, "servers": [entry]})
        assert not Servers(tmp_path).are_up
        down(tmp_path)
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_start_that_was_killed_half_way_is_not_up(tmp_path: Path, servers: Servers) -> None:
    servers.start("sleeper", SLEEP)
    assert not Servers(tmp_path).are_up
    servers.note_ready()
    assert Servers(tmp_path).are_up


def test_a_server_that_ends_is_reported_with_the_end_of_its_log(servers: Servers) -> None:
    server = servers.start("broken", (sys.executable, "-c", "print('address already in use')"))
    with pytest.raises(ServerError, match=r"broken ended[\s\S]*address already in use"):
        servers.wait(server, lambda: False, what="its health", timeout_s=30.0)


def test_a_server_that_does_not_get_well_is_not_waited_for_for_ever(servers: Servers) -> None:
    server = servers.start("slow", SLEEP)
    with pytest.raises(ServerError, match="no health within 0 s"):
        servers.wait(server, lambda: False, what="health", timeout_s=0.0)


def test_a_server_that_ignores_the_request_to_end_is_killed(
    tmp_path: Path, servers: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tools.cluster.servers.STOP_S", 0.1)
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    server = servers.start("deaf", (sys.executable, "-c", deaf))
    log = tmp_path / "logs/deaf.log"
    servers.wait(server, lambda: "deaf" in log.read_text(), what="deafness", timeout_s=30.0)
    assert servers.stop() == ["deaf"]
    assert not server.lives


def test_ports_that_are_given_out_together_differ_and_are_none_of_a_connections() -> None:
    ports = free_ports(20)
    assert len(set(ports)) == 20
    first = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    assert max(ports) < first, "a client that calls an ended server may get that port as its own"


def test_the_kubeconfig_and_the_keys_are_for_their_owner_alone(tmp_path: Path) -> None:
    from tools.cluster.servers import dump

    path = dump(tmp_path / "kubeconfig", {"a": 1})
    assert path.stat().st_mode & 0o077 == 0
    assert read_json(path) == {"a": 1}


def test_a_killed_server_has_no_thread_left_that_holds_its_port(tmp_path: Path) -> None:
    (port,) = free_ports(1)
    asked = tmp_path / "asked"
    first_ends = (
        "import ctypes, pathlib, socket, threading, time\n"
        f"held = socket.create_server(('127.0.0.1', {port}))\n"
        "def hold():\n"
        f"    while not pathlib.Path({str(asked)!r}).exists():\n"
        "        time.sleep(0.01)\n"
        "threading.Thread(target=hold).start()\n"
        "print('up', flush=True)\n"
        "ctypes.CDLL(None).pthread_exit(None)\n"
    )
    servers = Servers(tmp_path)
    server = servers.start("threads", (sys.executable, "-c", first_ends))
    servers.wait(server, lambda: "up" in (tmp_path / "logs/threads.log").read_text(), what="start", timeout_s=30.0)
    while server.lives:
        time.sleep(0.01)
    with pytest.raises(OSError, match="in use"):
        socket.create_server(("127.0.0.1", port))
    later = threading.Timer(0.5, asked.touch)
    later.start()
    servers.kill(server)
    later.join()
    socket.create_server(("127.0.0.1", port)).close()


@pytest.mark.parametrize("words", [["--folder", "x", "up"], ["up", "--folder", "x"]])
def test_the_folder_is_named_before_the_command_or_after_it(words: list[str]) -> None:
    # Benchmarks name it before.
    assert build_parser().parse_args(words).folder == Path("x")
    assert build_parser().parse_args(["down"]).folder == FOLDER
