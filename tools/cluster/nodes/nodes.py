"""Nodes of a test cluster on this machine: they run pods in containers, have Services, DNS and volumes."""

import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.build_cache import say
from tools.cluster.access import Access
from tools.cluster.nodes.addons import Kubectl, apply_addons
from tools.cluster.nodes.images import write_archive
from tools.cluster.nodes.node import POD_NETWORK, Node, node_name
from tools.cluster.nodes.sandbox import Sandbox
from tools.cluster.servers import Server, ServerError, Servers, dump

NODES_MAX = 8
IMAGES = "images"
"""Folder of the archives that every node needs."""
READY_S_MAX = 120.0
POLL_S = 0.2
PROXY_USER = "system:kube-proxy"
USER = 65532
"""Whom the programs of the images run as."""


class Nodes:
    """The nodes of one cluster.

    Args:
        folder: Folder of the cluster.
        programs: Paths of the programs by name.
        servers: Where processes are recorded.
        sandbox: Where nodes run; it knows how many they are.
    """

    def __init__(self, folder: Path, programs: Mapping[str, Path], servers: Servers, sandbox: Sandbox) -> None:
        self._folder, self._programs, self._servers, self._sandbox = folder, programs, servers, sandbox
        self.all = [Node(number, folder, sandbox, programs, servers) for number in range(1, sandbox.nodes + 1)]

    def named(self, name: str) -> Node:
        """Return a node.

        Raises:
            ServerError: If there is none of that name.
        """
        for node in self.all:
            if node.name == name:
                return node
        raise ServerError(f"no node {name!r}; there are: {', '.join(node.name for node in self.all) or 'none'}")

    def start_runtimes(self) -> None:
        """Start every containerd, which needs no API server, and give it the images of pause and CoreDNS."""
        for node in self.all:
            self._sandbox.cgroup.make(node.name)
            node.start_runtime()
        images = self._folder / IMAGES
        images.mkdir()
        archives = [
            write_archive(images / f"{name}.tar", self._programs[name], user=USER) for name in ("pause", "coredns")
        ]
        for node in self.all:
            node.wait_for_runtime()
            node.load(archives)

    def start(self, access: Access, kubectl: Kubectl) -> None:
        """Start kubelets and kube-proxy, and wait until the nodes are ready and names are resolved."""
        started_s = time.monotonic()
        kubelets = [node.start_kubelet(access) for node in self.all]
        apply_addons(kubectl, self._folder)
        for node, kubelet in zip(self.all, kubelets, strict=True):
            self._wait_ready(node, kubelet, kubectl)
        proxy = self._start_proxy(access)
        self._servers.wait(
            proxy, lambda: _available(kubectl, "coredns"), what="CoreDNS's readiness", timeout_s=READY_S_MAX
        )
        say(f"{len(self.all)} nodes ready in {time.monotonic() - started_s:.1f} s")

    def _wait_ready(self, node: Node, kubelet: Server, kubectl: Kubectl, *, since: str = "") -> None:
        """Wait until a node says that it is ready, later than ``since``."""

        def holds() -> bool:
            ready = condition(kubectl, "node", node.name, kind="Ready")
            return ready.get("status") == "True" and ready["lastHeartbeatTime"] != since

        self._servers.wait(kubelet, holds, what=f"readiness of {node.name}", timeout_s=READY_S_MAX)

    def kill_kubelet(self, node: Node) -> None:
        """End a kubelet by SIGKILL.

        Raises:
            ServerError: If it does not run.
        """
        kubelet = self._servers.named(node.kubelet_server)
        if kubelet is None or not kubelet.lives:
            raise ServerError(f"the kubelet of {node.name} does not run: node-start {node.name} starts it")
        self._servers.kill(kubelet)

    def start_kubelet(self, node: Node, access: Access, kubectl: Kubectl) -> None:
        """Start a kubelet again, and wait until its node is ready; nothing where it runs."""
        kubelet = self._servers.named(node.kubelet_server)
        if kubelet is None or not kubelet.lives:
            since = condition(kubectl, "node", node.name, kind="Ready").get("lastHeartbeatTime", "")
            self._wait_ready(node, node.start_kubelet(access), kubectl, since=since)

    def load(self, archives: Sequence[Path]) -> None:
        """Import images into every node."""
        for node in self.all:
            node.load(archives)

    def _start_proxy(self, access: Access) -> Server:
        """One for all: the nodes share a network namespace."""
        kubeconfig = access.write_kubeconfig(self._folder / "proxy.kubeconfig", user=PROXY_USER)
        address = self._sandbox.address(0)
        configuration = dump(
            self._folder / "proxy.json",
            {
                "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
                "kind": "KubeProxyConfiguration",
                "mode": "iptables",
                "clientConnection": {"kubeconfig": str(kubeconfig)},
                "hostnameOverride": node_name(1),
                "clusterCIDR": POD_NETWORK,
                # Two pods of one bridge would else answer each other past the translation of the Service's address.
                "iptables": {"masqueradeAll": True},
                "conntrack": {
                    "maxPerCore": 0,
                    "min": 0,
                    "tcpEstablishedTimeout": "0s",
                    "tcpCloseWaitTimeout": "0s",
                },
                "healthzBindAddress": f"{address}:10256",
                "metricsBindAddress": f"{address}:10249",
            },
        )
        command = self._sandbox.command([self._programs["kube-proxy"], f"--config={configuration}"])
        return self._servers.start("kube-proxy", command)


def users(count: int) -> dict[str, tuple[str, ...]]:
    """Return the users that nodes are, each with its groups."""
    kubelets = {f"system:node:{node_name(number)}": ("system:nodes",) for number in range(1, count + 1)}
    return {**kubelets, PROXY_USER: ()}


def condition(kubectl: Kubectl, *words: str, kind: str) -> dict[str, str]:
    """Return a condition of an object, empty where there is none yet."""
    try:
        found: dict[str, Any] = json.loads(kubectl("get", *words, "-o", "json"))
    except ServerError:
        return {}
    return next((each for each in found["status"].get("conditions") or () if each["type"] == kind), {})


def _available(kubectl: Kubectl, deployment: str) -> bool:
    said = condition(kubectl, "--namespace=kube-system", "deployment", deployment, kind="Available")
    return said.get("status") == "True"
