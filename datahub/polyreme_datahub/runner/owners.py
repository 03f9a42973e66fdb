"""Names of the processes that hold leases: a process on the same machine that is dead holds nothing any longer.

A host's name alone does not say whose numbers its processes have: pods in a node's network share its name, and each
counts its own processes. So the boot and the namespace of process numbers are part of a name.
"""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

from polyreme_datahub.registry import work_items
from polyreme_datahub.registry.engine import Database

BOOT = Path("/proc/sys/kernel/random/boot_id")
PROCESSES = Path("/proc/self/ns/pid")
HOST_CHARACTERS_MAX = 80
BOOT_CHARACTERS = 8


def owner_name() -> str:
    """Name this process: machine, process number, its start, and a random part."""
    pid = os.getpid()
    return f"{_machine()}/{pid}/{_started(pid)}/{secrets.token_hex(8)}"


def free_dead_owners(database: Database, flow: str) -> None:
    """Give back what dead processes of this machine hold of a flow, so that no worker waits for their leases."""
    for owner in work_items.owners_of(database, flow):
        if _is_dead(owner):
            work_items.free_owner(database, owner)


def _is_dead(owner: str) -> bool:
    machine, _, rest = owner.partition("/")
    if machine != _machine():
        return False
    pid, started, _ = rest.split("/")
    return _started(int(pid)) != started


def _machine() -> str:
    """Name what process numbers count in: host, boot and namespace."""
    host = socket.gethostname().replace("/", "-")[:HOST_CHARACTERS_MAX]
    try:
        boot = BOOT.read_text("utf-8").strip()[:BOOT_CHARACTERS]
        namespace = PROCESSES.readlink().name.strip("pid:[]")
    except OSError:
        return host
    return f"{host}.{boot}.{namespace}"


def _started(pid: int) -> str:
    """Return when a process started, in ticks since the boot; nothing where there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text("utf-8", "replace")
    except OSError:
        return "" if not _is_alive(pid) else "?"
    return stat.rpartition(")")[2].split()[19]


def _is_alive(pid: int) -> bool:
    """Tell where there is no /proc."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
