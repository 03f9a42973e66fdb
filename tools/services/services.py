"""What can be done with the services of a folder: up, down, status; PostgreSQL, Pulsar and S3 on this machine."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from polyreme_system.files import read_json, write_json
from tools.build_cache import locked, say
from tools.cluster.servers import ServerError, Servers
from tools.s3.server import ATTRIBUTES_NAME, Buckets, program
from tools.services import postgresql
from tools.services.guard import held
from tools.services.postgresql import Postgresql
from tools.services.pulsar import Pulsar, jars_folder

FOLDER = Path(".polyreme/services")
"""Folder of this checkout's services; git ignores it."""
NAMES = ("pulsar", "s3", "postgresql")
BUCKET = "polyreme"
VARIABLES_NAME = "variables.json"
BUSY = "another command is at work in {}: waiting for it"
TRIES = 3
"""A port that was free may be taken before its server listens."""
_DATA = ("buckets", ATTRIBUTES_NAME, "pulsar", VARIABLES_NAME)


def build(names: Collection[str] = NAMES) -> None:
    """Get what is missing of some services, so that a later ``up`` takes seconds.

    Raises:
        BuildError: If a program can't be had.
    """
    if "s3" in names:
        program(os.environ)
    if "pulsar" in names:
        jars_folder(os.environ)


def up(folder: Path, names: Collection[str] = NAMES) -> dict[str, str]:
    """Return the variables of services that run, and start them if they do not.

    Raises:
        BuildError: If a program can't be had.
        ServerError: If a server does not get ready.
    """
    folder = folder.resolve()
    build(names)
    with locked(folder, busy=BUSY.format(folder)):
        servers, known = Servers(folder), read_json(folder / VARIABLES_NAME)
        if servers.are_up and known:
            say(f"the services in {folder} are up")
            return known
        for number in range(1, TRIES + 1):
            _clear(folder, servers)
            started_s = time.monotonic()
            try:
                variables = _start(folder, servers, names)
            except ServerError as error:
                servers.stop()
                if number == TRIES or "address already in use" not in str(error).lower():
                    raise
                say("a port was taken meanwhile: trying others")
                continue
            except BaseException:
                servers.stop()
                raise
            say(f"up in {time.monotonic() - started_s:.1f} s")
            return variables
    raise AssertionError("unreachable")


def _start(folder: Path, servers: Servers, names: Collection[str]) -> dict[str, str]:
    """All at a time: the slowest first, and none is waited for before every one is started."""
    makers: dict[str, Callable[[], Pulsar | Buckets | Postgresql]] = {
        "pulsar": lambda: Pulsar(folder, servers),
        "s3": lambda: Buckets(folder / "buckets", servers, (BUCKET,)),
        "postgresql": lambda: Postgresql(folder, servers),
    }
    services = [make() for name, make in makers.items() if name in names]
    for service in services:
        service.start()
    variables = {name: value for service in services for name, value in service.wait().items()}
    if "s3" in names:
        variables["POLYREME_OBJECTS_URL"] = f"s3://{BUCKET}"
    write_json(folder / VARIABLES_NAME, variables, mode=0o600)
    servers.note_ready()
    return variables


def down(folder: Path) -> None:
    """Stop what ``up`` started in a folder, and nothing else; its data go, its logs stay."""
    folder = folder.resolve()
    if not folder.exists():
        say(f"no services in {folder}")
        return
    with locked(folder, busy=BUSY.format(folder)):
        servers = Servers(folder)
        stopped = servers.stop()
        _clear(folder, servers, logs=True)
    say(f"stopped {', '.join(stopped)}" if stopped else f"nothing runs in {folder}")


def status(folder: Path) -> int:
    """Say what runs; 0 when every service is up."""
    servers = Servers(folder.resolve())
    for server in servers.all:
        print(f"{server.name:<12} pid {server.pid:<8} {'runs' if server.lives else 'ended'}")
    if not servers.all:
        print(f"no services in {folder.resolve()}")
        return 1
    return int(not servers.are_up)


@contextlib.contextmanager
def shared(folder: Path, names: Collection[str] = NAMES) -> Iterator[Mapping[str, str]]:
    """Services of several processes: the first one starts them, and the end of the last one stops them."""
    with held(folder):
        yield up(folder, names)


def _clear(folder: Path, servers: Servers, *, logs: bool = False) -> None:
    """Stop leftovers of an earlier start and remove their data, and their logs unless these are to stay."""
    servers.stop()
    postgresql.clear(folder)
    for name in _DATA if logs else (*_DATA, "logs"):
        path = folder / name
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
