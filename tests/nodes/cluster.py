"""The cluster with nodes under test: the one that KUBECONFIG names, or one that the tests bring up."""

import contextlib
import json
import os
import shutil
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from polyreme_api.labels import RESOURCE_DEVICE
from tests.machine import require
from tools import debian
from tools.cluster.binaries import program_path
from tools.cluster.cluster import FOLDER, down, kill_node, load, named_cluster, start_node, tag_images, up
from tools.cluster.nodes.addons import Kubectl
from tools.cluster.nodes.sandbox import Sandbox
from tools.cluster.servers import ServerError, Servers

ROOT = Path(__file__).parents[2]
NODES = 2
AUDIT_POLICY = Path(__file__).with_name("audit.yaml")
AUDIT_LOG = "logs/audit.log"
BACKUP = "etcd-backup"
RESTARTS = "logs/restarts"
"""From when to when the API server was not ready: it does not know all roles then, and refuses what they allow."""
TIME_FORMAT = "%Y-%m-%dT%H:%M:%S"
PATIENCE_S = 300.0
POLL_S = 0.2
RESTRICTED = {
    "pod-security.kubernetes.io/enforce": "restricted",
    "pod-security.kubernetes.io/enforce-version": "latest",
}
HARDENED = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
"""What the restricted level asks of a container."""

Manifest = dict[str, Any]


class Cluster:
    """A cluster whose nodes run pods.

    Args:
        kubeconfig: Of the cluster.
        folder: Folder of the cluster that the tests brought up; None for another one.
    """

    def __init__(self, kubeconfig: Path, folder: Path | None) -> None:
        self.kubeconfig, self.folder = kubeconfig, folder
        self.kubectl = Kubectl(program_path("kubectl", os.environ), kubeconfig)

    def load(self, archives: Sequence[Path]) -> None:
        """Import images into every node."""
        load(self._own(), os.environ, archives)

    def tag(self, tag: str) -> None:
        """Give our images a second tag in every node."""
        tag_images(self._own(), os.environ, "docker.io/polyreme/", tag)

    def kill_kubelet(self, node: str) -> None:
        """Kill the kubelet of a node."""
        kill_node(self._own(), os.environ, node)

    def start_kubelet(self, node: str) -> None:
        """Start the kubelet of a node again."""
        start_node(self._own(), os.environ, node)

    def back_up(self) -> None:
        """Copy what etcd holds."""
        with self._without(["etcd"]) as folder:
            shutil.rmtree(folder / BACKUP, ignore_errors=True)
            shutil.copytree(folder / "etcd", folder / BACKUP)

    def restore(self) -> None:
        """Have etcd hold what it held then: resource versions go back."""
        with self._without(["kube-apiserver", "etcd"]) as folder:
            shutil.rmtree(folder / "etcd")
            (folder / BACKUP).rename(folder / "etcd")

    def restart_control_plane(self) -> None:
        """Kill etcd and the API server, and start them again."""
        with self._without(["kube-apiserver", "etcd"]):
            pass

    @contextlib.contextmanager
    def _without(self, names: Sequence[str]) -> Iterator[Path]:
        """Kill servers of the control plane, and start them again after the block, the last one first."""
        folder = self._own()
        servers = Servers(folder)
        commands = {}
        for name in names:
            server = servers.named(name)
            assert server is not None
            commands[name] = Path(f"/proc/{server.pid}/cmdline").read_text().rstrip("\0").split("\0")
            servers.kill(server)
        yield folder
        began = time.strftime(TIME_FORMAT, time.gmtime())
        started = [servers.start(name, commands[name], stop_signal=signal.SIGKILL) for name in reversed(names)]

        def ready() -> str:
            ended = [server.name for server in started if not server.lives]
            assert not ended, f"{ended} ended at once: see {folder / 'logs'}"
            return self.kubectl("get", "--raw", "/readyz")

        self.until(ready, "the API server is ready")
        with (folder / RESTARTS).open("a") as log:
            log.write(f"{began} {time.strftime(TIME_FORMAT, time.gmtime())}\n")

    def freeze(self, node: str, frozen: bool) -> None:
        """Stop every container of a node where it is, as when a machine hangs, or let them continue."""
        Sandbox(self._own()).cgroup.child(node).freeze(frozen)

    def offer(self, node: str, devices: int | None) -> None:
        """Have a node offer devices, as a device plugin does; None: it is no longer there."""
        amounts = {RESOURCE_DEVICE: None if devices is None else str(devices)}
        patch = json.dumps({"status": {"capacity": amounts, "allocatable": amounts}})
        self.kubectl("patch", "node", node, "--subresource=status", "--type=merge", "-p", patch)

    @property
    def gateway(self) -> str:
        """Address of this machine as pods see it: of ours, or what POLYREME_GATEWAY says of a cluster that is named."""
        return Sandbox(self.folder).gateway if self.folder else os.environ["POLYREME_GATEWAY"]

    def _own(self) -> Path:
        assert self.folder is not None, "not in the power of these tests on a cluster that KUBECONFIG names"
        return self.folder

    def get(self, *words: str) -> Manifest:
        """Return an object, or a list."""
        found: Manifest = json.loads(self.kubectl("get", *words, "-o", "json"))
        return found

    def until(self, holds: Callable[[], Any], what: str, *, patience_s: float = PATIENCE_S) -> Any:
        """Poll until something holds, and return it."""
        deadline_s = time.monotonic() + patience_s
        while True:
            with contextlib.suppress(ServerError):
                if found := holds():
                    return found
            assert time.monotonic() < deadline_s, f"never: {what}"
            time.sleep(POLL_S)

    def until_pod(self, name: str, phase: str, *, namespace: str, patience_s: float = PATIENCE_S) -> Manifest:
        """Wait until a pod is in a phase, and return it."""
        seen: list[Manifest] = []

        def holds() -> bool:
            seen[:] = [self.get("--namespace", namespace, "pod", name)]
            return bool(seen[0]["status"].get("phase") == phase)

        try:
            self.until(holds, f"pod {name} is {phase}", patience_s=patience_s)
        except AssertionError as error:
            events = self.kubectl("--namespace", namespace, "events")
            raise AssertionError(f"{error}: {json.dumps([each['status'] for each in seen])}\n{events}") from None
        return seen[0]

    @contextlib.contextmanager
    def namespace(self, name: str, labels: Mapping[str, str] = RESTRICTED) -> Iterator[str]:
        """Have a namespace, which enforces the restricted level, until the block ends."""
        self.kubectl.apply(
            [{"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": dict(labels)}}]
        )
        try:
            self.until(lambda: self.get("--namespace", name, "serviceaccount", "default"), "its service account")
            yield name
        finally:
            self.kubectl("delete", "namespace", name, "--wait=false")


def pod(name: str, image: str, *, args: Sequence[str] = (), command: Sequence[str] = ()) -> Manifest:
    """A pod that the restricted level admits."""
    container = {
        "name": "main",
        "image": image,
        "imagePullPolicy": "Never",
        "args": list(args),
        "securityContext": HARDENED,
        "resources": {"limits": {"cpu": "1", "memory": "128Mi"}},
    }
    if command:
        container["command"] = list(command)
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "runAsUser": 65532, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [container],
        },
    }


@contextlib.contextmanager
def cluster_for_tests() -> Iterator[Cluster]:
    """Have the cluster that KUBECONFIG names, or have one of our own; skip where the machine refuses that."""
    folder = (ROOT / FOLDER).with_name("nodes")
    if given := named_cluster(folder, os.environ):
        yield Cluster(Path(given), None)
        return
    require([*debian.FOR_NODES, *debian.FOR_IMAGES])
    ours = not Servers(folder).are_up
    try:
        options = [f"--audit-policy-file={AUDIT_POLICY}", f"--audit-log-path={folder / AUDIT_LOG}"]
        yield Cluster(Path(up(folder, os.environ, nodes=NODES, api_options=options)), folder)
    finally:
        if ours:
            down(folder)
