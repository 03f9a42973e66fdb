"""One node: a containerd and a kubelet of its own, below one control group, with its own bridge for its pods."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tools.build_cache import BuildError
from tools.cluster.access import Access
from tools.cluster.nodes.images import image_name
from tools.cluster.nodes.sandbox import Sandbox
from tools.cluster.servers import Server, Servers, dump
from tools.debian import CNI_FOLDERS

POD_NETWORK = "10.244.0.0/16"
DNS_ADDRESS = "10.0.0.10"
READY_S_MAX = 60.0
LEASE_S = 16
"""Duration of a node's Lease: the kubelet renews it in a quarter of it."""
STATUS_S = 4
PODS_MAX = 60
STATIC_PODS = "static"
"""Folder, below a node's, of the pods that its kubelet runs by itself."""
CONTAINERD = """\
version = 3
root = "{root}"
state = "{state}"
disabled_plugins = ["io.containerd.nri.v1.nri", "io.containerd.internal.v1.tracing"]

[grpc]
address = "{socket}"

[plugins."io.containerd.cri.v1.images"]
snapshotter = "overlayfs"
[plugins."io.containerd.cri.v1.images".pinned_images]
sandbox = "{pause}"

[plugins."io.containerd.cri.v1.runtime"]
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true
[plugins."io.containerd.cri.v1.runtime".cni]
bin_dirs = ["{plugins}"]
conf_dir = "{networks}"
[plugins."io.containerd.cri.v1.runtime".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"
runtime_path = "{shim}"

[plugins."io.containerd.internal.v1.opt"]
path = "{root}/opt"
"""


class Node:
    """One node of a cluster.

    Args:
        number: From 1.
        folder: Folder of the cluster.
        sandbox: Where it runs.
        programs: Paths of the programs by name.
        servers: Where its processes are recorded.
    """

    def __init__(
        self, number: int, folder: Path, sandbox: Sandbox, programs: Mapping[str, Path], servers: Servers
    ) -> None:
        self.name = node_name(number)
        self._number, self._sandbox, self._programs, self._servers = number, sandbox, programs, servers
        self._folder, self._state = folder / self.name, Path("/run", self.name)
        self._socket = self._state / "containerd.sock"
        self._runtime: Server | None = None

    @property
    def address(self) -> str:
        """Its address in the cluster's network."""
        return self._sandbox.address(self._number)

    def start_runtime(self) -> None:
        """Start containerd and wait for its answer."""
        networks = self._folder / "networks"
        networks.mkdir(parents=True, exist_ok=True)
        dump(networks / "10-bridge.conflist", self._network())
        configuration = self._folder / "containerd.toml"
        configuration.write_text(
            CONTAINERD.format(
                root=self._folder / "containerd",
                state=self._state / "containerd",
                socket=self._socket,
                pause=image_name("pause"),
                plugins=cni_folder(),
                shim=self._programs["containerd-shim-runc-v2"],
                networks=networks,
            )
        )
        command = self._sandbox.command([self._programs["containerd"], "--config", configuration])
        self._runtime = self._servers.start(f"{self.name}-containerd", command)

    def wait_for_runtime(self) -> None:
        """Wait until containerd answers."""
        assert self._runtime is not None
        path = Path(f"/proc/{self._runtime.pid}/root{self._socket}")
        self._servers.wait(
            self._runtime, path.is_socket, what=f"containerd's socket of {self.name}", timeout_s=READY_S_MAX
        )

    def load(self, archives: Sequence[Path]) -> None:
        """Import images into this node."""
        for archive in archives:
            self.ctr("images", "import", "--local", "--snapshotter", "overlayfs", str(archive.resolve()))

    def ctr(self, *arguments: str) -> str:
        """Run containerd's client on the kubelet's images and containers."""
        return self._sandbox.run(
            [self._programs["ctr"], "--address", self._socket, "--namespace", "k8s.io", *arguments], timeout_s=600.0
        )

    def start_kubelet(self, access: Access) -> Server:
        """Start the kubelet; it registers the node."""
        kubeconfig = access.write_kubeconfig(self._folder / "kubeconfig", user=f"system:node:{self.name}")
        (self._folder / STATIC_PODS).mkdir(exist_ok=True)
        configuration = dump(self._folder / "kubelet.json", self._kubelet(access))
        command: list[str | Path] = [
            self._programs["kubelet"],
            f"--config={configuration}",
            f"--kubeconfig={kubeconfig}",
            f"--root-dir={self._folder / 'kubelet'}",
            f"--cert-dir={self._folder / 'certificates'}",
            f"--hostname-override={self.name}",
            f"--node-ip={self.address}",
        ]
        return self._servers.start(self.kubelet_server, self._sandbox.command(command))

    @property
    def kubelet_server(self) -> str:
        """Name of its kubelet among the servers."""
        return f"{self.name}-kubelet"

    def _network(self) -> dict[str, Any]:
        ranges = [[{"subnet": f"10.244.{self._number}.0/24"}]]
        bridge = {
            "type": "bridge",
            "bridge": f"pods{self._number}",
            "isGateway": True,
            "hairpinMode": True,
            "ipam": {
                "type": "host-local",
                "ranges": ranges,
                "routes": [{"dst": "0.0.0.0/0"}],
                "dataDir": str(self._folder / "addresses"),
            },
        }
        return {"cniVersion": "1.0.0", "name": "pods", "plugins": [bridge]}

    def _kubelet(self, access: Access) -> dict[str, Any]:
        return {
            "apiVersion": "kubelet.config.k8s.io/v1beta1",
            "kind": "KubeletConfiguration",
            "address": self.address,
            "healthzBindAddress": self.address,
            "authentication": {
                "anonymous": {"enabled": False},
                "webhook": {"enabled": False},
                "x509": {"clientCAFile": str(access.keys / "kubelet-client.crt")},
            },
            # Only the API server has a certificate that the line above accepts.
            "authorization": {"mode": "AlwaysAllow"},
            "containerRuntimeEndpoint": f"unix://{self._socket}",
            "cgroupDriver": "cgroupfs",
            "cgroupRoot": f"/{self._sandbox.cgroup.name}/{self.name}",
            "failCgroupV1": False,
            "failSwapOn": False,
            "enforceNodeAllocatable": [],
            "localStorageCapacityIsolation": False,
            # Lowering it takes a capability that a container or a small virtual machine may lack.
            "oomScoreAdj": 0,
            "makeIPTablesUtilChains": False,
            "resolvConf": "",
            "clusterDNS": [DNS_ADDRESS],
            "clusterDomain": "cluster.local",
            "podLogsDir": str(self._folder / "pods"),
            "staticPodPath": str(self._folder / STATIC_PODS),
            "fileCheckFrequency": "2s",
            "volumePluginDir": str(self._folder / "plugins"),
            "seccompDefault": True,
            "maxPods": PODS_MAX,
            "nodeLeaseDurationSeconds": LEASE_S,
            "nodeStatusUpdateFrequency": f"{STATUS_S}s",
            "nodeStatusReportFrequency": f"{STATUS_S}s",
            "serializeImagePulls": False,
            # Nodes share this machine's disk and memory: how full they are is not theirs to decide by.
            "imageGCHighThresholdPercent": 100,
            "evictionHard": {"memory.available": "0%", "nodefs.available": "0%", "imagefs.available": "0%"},
        }


def node_name(number: int) -> str:
    """Return the name of a node."""
    return f"node-{number}"


def cni_folder() -> str:
    """Return the folder of the CNI plugins.

    Raises:
        BuildError: If there is none.
    """
    for folder in CNI_FOLDERS:
        if Path(folder, "bridge").exists() and Path(folder, "host-local").exists():
            return folder
    raise BuildError(
        f"no CNI plugins bridge and host-local in {', '.join(CNI_FOLDERS)}: apt-get install containernetworking-plugins"
    )
