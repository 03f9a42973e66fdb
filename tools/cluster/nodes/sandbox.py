"""Namespaces and a control group that hold everything of the nodes, so that nothing of them outlives them.

Bridges, iptables chains, mounts and container networks live in a network and a mount namespace of the cluster's own,
and are gone with its last process. All processes are members of one control group, by which ``destroy`` finds them
even after a start that was killed half-way.
"""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

from polyreme_system.files import read_json, write_json
from tools.build_cache import BuildError
from tools.cluster.nodes.cgroups import PROCESSES, Cgroup
from tools.cluster.servers import ServerError, Servers

HOLDER = "namespaces"
READY_S_MAX = 20.0
NETWORKS = range(1, 255)
"""Second-last byte of the cluster's network; 198.18.0.0/15 is kept free for tests of networks (RFC 2544)."""
RECORD = "sandbox.json"
# Who can't join, since a "down" came first, ends.
_JOIN = 'while [ "$1" != -- ]; do echo 0 > "$1" || exit 1; shift; done; shift; exec "$@"'
_HOLD = """
set -eu
mount --make-rshared /
mount -t tmpfs tmpfs /run
# Node programs also write below /var, whatever they are configured to: they see it through a layer of their own.
mkdir /run/folder /run/upper /run/work
mount --bind "$1" /run/folder
mount -t overlay overlay -o lowerdir=/var,upperdir=/run/upper,workdir=/run/work /var
mount --bind /run/folder "$1"
ip link set lo up
echo 1 > /proc/sys/net/ipv4/ip_forward
touch /run/ready
exec sleep infinity
"""


class Sandbox:
    """The namespaces of one folder's cluster.

    Args:
        folder: Folder of the cluster.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder.resolve()
        self.cgroup = Cgroup(f"polyreme-{hashlib.sha256(os.fsencode(self._folder)).hexdigest()[:8]}")
        self._record = read_json(folder / RECORD) or {}

    @staticmethod
    def recorded(folder: Path) -> bool:
        """Whether a sandbox of this folder was begun, and is not destroyed."""
        return (folder / RECORD).exists()

    @property
    def nodes(self) -> int:
        """Number of nodes that it is for."""
        return int(self._record.get("nodes", 0))

    @property
    def gateway(self) -> str:
        """Address of this machine as nodes and pods see it."""
        return f"198.18.{self._record['network']}.1"

    def address(self, number: int) -> str:
        """Address of a node; number 0 is the uplink's own."""
        return f"198.18.{self._record['network']}.{10 + number}"

    def open(self, servers: Servers, *, nodes: int) -> None:
        """Make the namespaces and connect them with this machine, with an address for each node.

        Raises:
            ServerError: If they do not get ready.
        """
        self._record["nodes"] = nodes
        self._write()
        system = self.cgroup.make("system")
        joined = [str(folder / PROCESSES) for folder in system.folders]
        unshare = [
            "unshare",
            "--net",
            "--mount",
            "--propagation",
            "private",
            "sh",
            "-c",
            _HOLD,
            "sh",
            str(self._folder),
        ]
        holder = servers.start(HOLDER, [_program("sh"), "-c", _JOIN, "sh", *joined, "--", *unshare])
        self._record["holder"] = holder.pid
        # The kernel's own view of the namespace: `/run/ready` is on a mount that only the holder sees.
        ready = Path(f"/proc/{holder.pid}/root/run/ready")
        servers.wait(holder, ready.exists, what="namespaces of the nodes", timeout_s=READY_S_MAX)
        self._connect(holder.pid, nodes + 1)

    def command(self, command: Sequence[str | Path]) -> list[str]:
        """Return the command that runs another one inside, with the same pid."""
        joined = [str(folder / "system" / PROCESSES) for folder in self.cgroup.folders]
        enter = ["nsenter", f"--target={self._record['holder']}", "--net", "--mount", "--"]
        return [_program("sh"), "-c", _JOIN, "sh", *joined, "--", *enter, *map(str, command)]

    def run(self, command: Sequence[str | Path], *, timeout_s: float = 120.0) -> str:
        """Run a command inside and return what it prints.

        Raises:
            ServerError: If it fails.
        """
        return _run(self.command(command), name=Path(command[0]).name, timeout_s=timeout_s)

    def destroy(self) -> int:
        """End every process of the nodes and remove what they left; return how many processes there were."""
        killed = self.cgroup.kill()
        self.cgroup.remove()
        self._record = {}
        (self._folder / RECORD).unlink(missing_ok=True)
        return killed

    def _connect(self, holder: int, addresses: int) -> None:
        """A pair of interfaces, one end here and one inside; their network is the first that is free."""
        for network in NETWORKS:
            pair = ["ip", "link", "add", f"polyreme{network}", "type", "veth"]
            done = subprocess.run(
                [*pair, "peer", "name", "uplink", "netns", str(holder)], capture_output=True, text=True, check=False
            )
            if done.returncode == 0:
                break
            if "File exists" not in done.stderr:
                raise ServerError(f"{' '.join(pair)} failed: {done.stderr.strip()}")
        else:
            raise ServerError(f"all {len(NETWORKS)} networks are taken: ip link show type veth")
        self._record["network"] = network
        self._write()
        _run(["ip", "address", "add", f"{self.gateway}/24", "dev", f"polyreme{network}"], name="ip")
        _run(["ip", "link", "set", f"polyreme{network}", "up"], name="ip")
        for number in range(addresses):
            self.run(["ip", "address", "add", f"{self.address(number)}/24", "dev", "uplink"])
        self.run(["ip", "link", "set", "uplink", "up"])
        self.run(["ip", "route", "add", "default", "via", self.gateway])
        self.run(["iptables", "-t", "nat", "-A", "POSTROUTING", "-o", "uplink", "-j", "MASQUERADE"])

    def _write(self) -> None:
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_json(self._folder / RECORD, self._record)


def _program(name: str) -> str:
    path = shutil.which(name)
    if path is None:
        raise BuildError(f"no {name} on PATH")
    return path


def _run(command: Sequence[str], *, name: str, timeout_s: float = 60.0) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s)
    if done.returncode != 0:
        raise ServerError(f"{name} exited with {done.returncode}: {(done.stderr or done.stdout).strip()[-2000:]}")
    return done.stdout
