"""What can be done with the cluster of a folder: up, down, status."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from tools.build_cache import BuildError, say
from tools.cluster.binaries import CLIENTS, PROGRAMS, programs
from tools.cluster.control_plane import KUBECONFIG_NAME, ControlPlane
from tools.cluster.server_folder import ServerFolder
from tools.cluster.servers import Servers

FOLDER = Path(".polyreme/cluster")
"""Folder of this checkout's cluster; git ignores it."""
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
    found, place = programs(environment), _place(folder)
    with place.locked():
        if Servers(folder).are_up:
            say(f"the cluster in {folder} is up")
            return str(folder / KUBECONFIG_NAME)
        kubeconfig = place.start(lambda servers: ControlPlane(folder, found, servers, api_options=api_options).start())
        say(f"kubectl: {found['kubectl']}")
        return str(kubeconfig)


def named_cluster(folder: Path, environment: Mapping[str, str]) -> str | None:
    """Return the kubeconfig of a cluster that is not ours, if KUBECONFIG names one."""
    given = environment.get("KUBECONFIG")
    return given if given and given != str(folder.resolve() / KUBECONFIG_NAME) else None


def build(folder: Path, environment: Mapping[str, str]) -> None:
    """Build what is missing, so that a later ``up`` takes seconds; only clients where KUBECONFIG names a cluster.

    Raises:
        BuildError: If a program can't be had.
    """
    if named_cluster(folder, environment):
        path = environment.get("PATH", "")
        programs(environment, [name for name in CLIENTS if shutil.which(name, path=path) is None])
    else:
        programs(environment, [program.name for program in PROGRAMS])


def down(folder: Path) -> None:
    """Stop what ``up`` started in a folder, and nothing else; its data go, its logs stay."""
    _place(folder.resolve()).down()


def status(folder: Path, environment: Mapping[str, str]) -> int:
    """Say what runs; 0 when a cluster is up."""
    folder = folder.resolve()
    if given := named_cluster(folder, environment):
        print(f"KUBECONFIG: {given}")
    is_up = _place(folder).status()
    if is_up:
        print(f"kubeconfig               {folder / KUBECONFIG_NAME}")
    return int(not is_up)


def _place(folder: Path) -> ServerFolder:
    return ServerFolder(path=folder, what="cluster", data=_DATA)
