"""Actions on the cluster of a folder: up, down, status."""

import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme_system.files import write_json
from tools.build_cache import BuildError, say
from tools.cluster.access import Access
from tools.cluster.binaries import CLIENTS, CONTROL_PLANE, NODES, PROGRAMS, program_path, programs
from tools.cluster.control_plane import KUBECONFIG_NAME, ControlPlane, ForNodes
from tools.cluster.nodes.addons import Kubectl
from tools.cluster.nodes.node import node_name
from tools.cluster.nodes.nodes import IMAGES, NODES_MAX, Nodes, users
from tools.cluster.nodes.probe import check_programs, refusal
from tools.cluster.nodes.sandbox import Sandbox
from tools.cluster.server_folder import ServerFolder
from tools.cluster.servers import ServerError, Servers

FOLDER = Path(".polyreme/cluster")
"""Folder of this checkout's cluster; git ignores it."""
ACCESS_NAME = "access.json"
_OF_NODES = ("volumes", IMAGES, "proxy.json", "proxy.kubeconfig", ACCESS_NAME)
_DATA = (
    *("etcd", "keys", "certificates", KUBECONFIG_NAME, "scheduler.json", "stages.yaml"),
    *_OF_NODES,
    *(node_name(number) for number in range(1, NODES_MAX + 1)),
)


def up(folder: Path, environment: Mapping[str, str], *, api_options: Sequence[str] = (), nodes: int = 0) -> str:
    """Return the kubeconfig of a cluster that answers, and start one if there is none.

    Args:
        folder: Folder of the cluster.
        environment: Variables; KUBECONFIG may name a cluster.
        api_options: Further options of the API server.
        nodes: Number of nodes that run pods in containers.

    Raises:
        BuildError: If a program can't be had.
        ServerError: If a server does not get ready, or a cluster is up with another number of nodes.
    """
    folder = folder.resolve()
    if given := named_cluster(folder, environment):
        if not any(Path(part).is_file() for part in given.split(os.pathsep) if part):
            raise BuildError(f"KUBECONFIG names no file: {given}; unset it to have a cluster here")
        say(f"KUBECONFIG names a cluster: {given}; nothing is started")
        return given
    if nodes:
        check_machine(nodes)
    found, place = programs(environment, (*CONTROL_PLANE, *(NODES if nodes else ()))), _place(folder)
    with place.locked():
        if Servers(folder).are_up:
            if (seen := Sandbox(folder).nodes) != nodes:
                raise ServerError(f"the cluster in {folder} is up with {seen} nodes, not {nodes}: stop it first (down)")
            say(f"the cluster in {folder} is up")
            return str(folder / KUBECONFIG_NAME)
        _clear_nodes(folder)
        try:
            kubeconfig = place.start(lambda servers: _start(folder, found, servers, api_options, nodes))
        except BaseException:
            _clear_nodes(folder)
            raise
        say(f"kubectl: {found['kubectl']}")
        return str(kubeconfig)


def _start(folder: Path, found: Mapping[str, Path], servers: Servers, api_options: Sequence[str], nodes: int) -> Path:
    if not nodes:
        return ControlPlane(folder, found, servers, api_options=api_options).start()
    _clear_nodes(folder)
    sandbox = Sandbox(folder)
    sandbox.open(servers, nodes=nodes)
    fleet = Nodes(folder, found, servers, sandbox)
    fleet.start_runtimes()
    for_nodes = ForNodes(address=sandbox.gateway, users=users(nodes))
    plane = ControlPlane(folder, found, servers, api_options=api_options, nodes=for_nodes)
    kubeconfig = plane.start()
    write_json(folder / ACCESS_NAME, plane.access.record(), mode=0o600)
    fleet.start(plane.access, Kubectl(found["kubectl"], kubeconfig))
    return kubeconfig


def check_machine(nodes: int) -> None:
    """See that nodes can run here.

    Raises:
        BuildError: If a program is missing, or the machine refuses a system call.
    """
    if not 0 < nodes <= NODES_MAX:
        raise BuildError(f"{nodes} nodes: a number from 1 to {NODES_MAX}")
    check_programs()
    if refused := refusal():
        raise BuildError(f"this machine can't run nodes: it refuses {refused}")


def load(folder: Path, environment: Mapping[str, str], archives: Sequence[Path]) -> None:
    """Import images into every node.

    Raises:
        ServerError: If no nodes are up, or an archive holds no image.
    """
    _nodes(folder, environment).load(archives)


def tag_images(folder: Path, environment: Mapping[str, str], prefix: str, tag: str) -> None:
    """Give the images whose name begins with a prefix a second tag in every node.

    Raises:
        ServerError: If no nodes are up.
    """
    for node in _nodes(folder, environment).all:
        for name in node.ctr("images", "list", "--quiet").split():
            if name.startswith(prefix) and "@" not in name:
                node.ctr("images", "tag", "--force", name, f"{name.rpartition(':')[0]}:{tag}")


def kill_node(folder: Path, environment: Mapping[str, str], name: str) -> None:
    """Kill a node's kubelet: the node is lost after some seconds, its containers continue.

    Raises:
        ServerError: If it does not run.
    """
    fleet = _nodes(folder, environment)
    fleet.kill_kubelet(fleet.named(name))


def start_node(folder: Path, environment: Mapping[str, str], name: str) -> None:
    """Start the kubelet of a node again, and wait until the node is ready.

    Raises:
        ServerError: If it does not get ready.
    """
    folder = folder.resolve()
    fleet = _nodes(folder, environment)
    access = Access.read(folder / ACCESS_NAME)
    fleet.start_kubelet(
        fleet.named(name), access, Kubectl(program_path("kubectl", environment), folder / KUBECONFIG_NAME)
    )


def _nodes(folder: Path, environment: Mapping[str, str]) -> Nodes:
    folder = folder.resolve()
    sandbox, servers = Sandbox(folder), Servers(folder)
    if not sandbox.nodes or not servers.are_up:
        raise ServerError(f"no cluster with nodes is up in {folder}: up --nodes 2 starts one")
    return Nodes(folder, programs(environment, (*CONTROL_PLANE, *NODES)), servers, sandbox)


def _clear_nodes(folder: Path) -> None:
    """End what nodes left, even if a start or stop of them was killed half-way."""
    if Sandbox.recorded(folder):
        Sandbox(folder).destroy()


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
    folder = folder.resolve()
    if Sandbox.recorded(folder):
        with _place(folder).locked():
            say(f"ended {Sandbox(folder).destroy()} processes of nodes")
    _place(folder).down()


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
