"""Actions on the services of a folder: up, down, status; PostgreSQL, Pulsar and S3 on this machine."""

import contextlib
import ipaddress
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from urllib.parse import urlsplit

from polyreme_system.files import read_json, write_json
from tools.build_cache import say
from tools.cluster.cluster import FOLDER as CLUSTER
from tools.cluster.nodes.sandbox import Sandbox
from tools.cluster.server_folder import ServerFolder
from tools.cluster.servers import LOOPBACK, ServerError, Servers
from tools.s3.server import ATTRIBUTES_NAME, Buckets, program
from tools.services.guard import held
from tools.services.postgresql import LINK_NAME, Postgresql
from tools.services.pulsar import Pulsar, jars_folder

FOLDER = Path(".polyreme/services")
"""Folder of this checkout's services; git ignores it."""
NAMES = ("pulsar", "s3", "postgresql")
BUCKET = "polyreme"
BRIDGE = "bridge"
"""Stands for this machine's address as pods of ``make cluster-up`` with nodes see it."""
VARIABLES_NAME = "variables.json"
_DATA = ("buckets", ATTRIBUTES_NAME, "pulsar", LINK_NAME, VARIABLES_NAME)


def build(names: Collection[str] = NAMES) -> None:
    """Get what is missing of some services, so that a later ``up`` takes seconds.

    Raises:
        BuildError: If a program can't be had.
    """
    if "s3" in names:
        program(os.environ)
    if "pulsar" in names:
        jars_folder(os.environ)


def listening_address(listen: str, *, cluster: Path = CLUSTER) -> str:
    """Return the IPv4 address of ``bridge``, or the one that is given.

    Raises:
        ServerError: If no nodes are up, or it is no address that clients can call.
    """
    if listen == BRIDGE:
        if not Sandbox.recorded(cluster):
            raise ServerError(f"LISTEN={BRIDGE}: no nodes are up in {cluster}; run make cluster-up NODES=2 first")
        return Sandbox(cluster).gateway
    try:
        address = ipaddress.IPv4Address(listen)
    except ValueError as error:
        raise ServerError(f"LISTEN={listen}: expected {BRIDGE}, or an IPv4 address of this machine") from error
    if address.is_unspecified:
        raise ServerError(f"LISTEN={listen}: clients get this address; name one that they can call")
    return str(address)


def up(folder: Path, names: Collection[str] = NAMES, *, host: str | None = None) -> dict[str, str]:
    """Return the variables of services that run, and start them if they do not.

    Args:
        folder: Folder of the services.
        names: Which of them.
        host: Address that they listen on, each with a password or token; by default loopback.

    Raises:
        BuildError: If a program can't be had.
        ServerError: If a server does not get ready.
    """
    folder = folder.resolve()
    build(names)
    place = _place(folder)
    with place.locked():
        known = read_json(folder / VARIABLES_NAME)
        if Servers(folder).are_up and known:
            if host and urlsplit(known["AWS_ENDPOINT_URL"]).hostname != host:
                raise ServerError(
                    f"the services in {folder} listen elsewhere than on {host}; run make services-down first"
                )
            say(f"the services in {folder} are up")
            return known
        return place.start(lambda servers: _start(folder, servers, names, host))


def _start(folder: Path, servers: Servers, names: Collection[str], host: str | None) -> dict[str, str]:
    """All at a time: the slowest first, and none is waited for before every one is started."""
    makers: dict[str, Callable[[], Pulsar | Buckets | Postgresql]] = {
        "pulsar": lambda: Pulsar(folder, servers, host=host),
        "s3": lambda: Buckets(folder / "buckets", servers, (BUCKET,), host=host or LOOPBACK),
        "postgresql": lambda: Postgresql(folder, servers, host=host),
    }
    services = [make() for name, make in makers.items() if name in names]
    for service in services:
        service.start()
    variables = {name: value for service in services for name, value in service.wait().items()}
    if "s3" in names:
        variables["POLYREME_OBJECTS_URL"] = f"s3://{BUCKET}"
    write_json(folder / VARIABLES_NAME, variables, mode=0o600)
    return variables


def down(folder: Path) -> None:
    """Stop what ``up`` started in a folder, and nothing else; its data go, its logs stay."""
    _place(folder.resolve()).down()


def status(folder: Path) -> int:
    """Say what runs; 0 when every service is up."""
    return int(not _place(folder.resolve()).status())


@contextlib.contextmanager
def shared(folder: Path, names: Collection[str] = NAMES) -> Iterator[Mapping[str, str]]:
    """Services of several processes: the first one starts them, and the end of the last one stops them."""
    with held(folder):
        yield up(folder, names)


def _place(folder: Path) -> ServerFolder:
    return ServerFolder(path=folder, what="services", data=_DATA)
