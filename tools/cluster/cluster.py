"""What can be done with the cluster of a folder: up, down, status."""

import os
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.build_cache import BuildError, locked, say
from tools.cluster.binaries import programs
from tools.cluster.control_plane import KUBECONFIG_NAME, ControlPlane
from tools.cluster.servers import ServerError, Servers

FOLDER = Path(".polyreme/cluster")
"""Folder of this checkout's cluster; git ignores it."""
BUSY = "another command is at work in {}: waiting for it"
TRIES = 3
"""A port that was free may be taken before its server listens."""
_DATA = ("etcd", "keys", "certificates", KUBECONFIG_NAME, "scheduler.json", "stages.yaml")


def up(folder: Path, environment: Mapping[str, str], *, api_options: Sequence[str] = ()) -> str:
    """Return the kubeconfig of a cluster that answers, and start one if there is none.

    Raises:
        BuildError: If a program can't be had.
        ServerError: If a server does not get ready.
    """
    folder = folder.resolve()
    if given := named_cluster(folder, environment):
        if not any(Path(part).is_file() for part in given.split(os.pathsep) if part):
            raise BuildError(f"KUBECONFIG names no file: {given}; unset it to have a cluster here")
        say(f"KUBECONFIG names a cluster: {given}; nothing is started")
        return given
    found = programs(environment)
    with locked(folder, busy=BUSY.format(folder)):
        servers = Servers(folder)
        if servers.are_up:
            say(f"the cluster in {folder} is up")
            return str(folder / KUBECONFIG_NAME)
        for number in range(1, TRIES + 1):
            _clear(folder, servers)
            started_s = time.monotonic()
            try:
                kubeconfig = ControlPlane(folder, found, servers, api_options=api_options).start()
                servers.note_ready()
            except ServerError as error:
                servers.stop()
                if number == TRIES or "address already in use" not in str(error):
                    raise
                say("a port was taken meanwhile: trying others")
                continue
            except BaseException:
                servers.stop()
                raise
            say(f"up in {time.monotonic() - started_s:.1f} s; kubectl: {found['kubectl']}")
            return str(kubeconfig)
    raise AssertionError("unreachable")


def named_cluster(folder: Path, environment: Mapping[str, str]) -> str | None:
    """Return the kubeconfig of a cluster that is not ours, if KUBECONFIG names one."""
    given = environment.get("KUBECONFIG")
    return given if given and given != str(folder.resolve() / KUBECONFIG_NAME) else None


def build(folder: Path, environment: Mapping[str, str]) -> None:
    """Build what is missing, so that a later ``up`` takes seconds; nothing where KUBECONFIG names a cluster.

    Raises:
        BuildError: If a program can't be had.
    """
    if not named_cluster(folder, environment):
        programs(environment)


def down(folder: Path) -> None:
    """Stop what ``up`` started in a folder, and nothing else; its data go, its logs stay."""
    folder = folder.resolve()
    if not folder.exists():
        say(f"no cluster in {folder}")
        return
    with locked(folder, busy=BUSY.format(folder)):
        servers = Servers(folder)
        stopped = servers.stop()
        _clear(folder, servers, logs=True)
    say(f"stopped {', '.join(stopped)}" if stopped else f"nothing runs in {folder}")


def status(folder: Path, environment: Mapping[str, str]) -> int:
    """Say what runs; 0 when a cluster is up."""
    folder = folder.resolve()
    if given := named_cluster(folder, environment):
        print(f"KUBECONFIG: {given}")
    servers = Servers(folder)
    for server in servers.all:
        print(f"{server.name:<24} pid {server.pid:<8} {'runs' if server.lives else 'ended'}")
    if not servers.all:
        print(f"no cluster in {folder}")
        return 1
    print(f"kubeconfig               {folder / KUBECONFIG_NAME}")
    return int(not servers.are_up)


def _clear(folder: Path, servers: Servers, *, logs: bool = False) -> None:
    """Stop leftovers of an earlier start and remove their data, and their logs unless these are to stay."""
    servers.stop()
    for name in _DATA if logs else (*_DATA, "logs"):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
