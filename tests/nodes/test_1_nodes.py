"""Nodes on this machine run restricted pods; and nothing of them outlives the cluster."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.machine import require
from tests.nodes.cluster import ROOT, Cluster, pod
from tools import debian
from tools.cluster.cluster import down
from tools.cluster.nodes.images import image_name
from tools.cluster.nodes.sandbox import NETWORKS, Sandbox
from tools.cluster.servers import Servers

POLL_S = 0.02
OUTSIDE = ("/run/netns", "/run/containerd", "/var/lib/cni", "/var/lib/kubelet", "/var/log/containers")
"""Where programs of nodes write on a machine of their own."""
COREDNS = image_name("coredns")


@pytest.mark.slow
def test_a_restricted_pod_runs_and_another_is_refused(cluster: Cluster) -> None:
    with cluster.namespace("restricted") as namespace:
        cluster.kubectl("--namespace", namespace, "create", "configmap", "names", "--from-literal=Corefile=.:5353 {\n}")
        manifest = pod("runs", COREDNS, args=["-conf", "/names/Corefile"])
        manifest["spec"]["volumes"] = [{"name": "names", "configMap": {"name": "names"}}]
        manifest["spec"]["containers"][0]["volumeMounts"] = [{"name": "names", "mountPath": "/names"}]
        manifest["metadata"]["namespace"] = namespace
        cluster.kubectl.apply([manifest])
        seen = cluster.until_pod("runs", "Running", namespace=namespace)
        assert seen["spec"]["nodeName"].startswith("node-")
        words = ("--namespace", namespace)
        cluster.until(lambda: "CoreDNS-" in cluster.kubectl(*words, "logs", "runs"), "its log")
        assert "CoreDNS-" in cluster.kubectl(*words, "exec", "runs", "--", "/coredns", "-version")
        del manifest["spec"]["containers"][0]["securityContext"]
        manifest["metadata"]["name"] = "refused"
        with pytest.raises(Exception, match="violates PodSecurity"):
            cluster.kubectl.apply([manifest])


@pytest.mark.slow
@pytest.mark.parametrize("begun", ["namespaces", "node-1-kubelet"])
def test_a_start_that_was_killed_half_way_leaves_nothing_after_down(tmp_path: Path, begun: str) -> None:
    require(debian.FOR_NODES)
    folder = tmp_path / "cluster"
    command = [sys.executable, "-m", "tools.cluster", "up", "--nodes", "1", "--folder", str(folder)]
    environment = {name: value for name, value in os.environ.items() if name != "KUBECONFIG"}
    starting = subprocess.Popen(
        command, cwd=ROOT, env={**environment, "PYTHONPATH": str(ROOT)}, stdout=subprocess.DEVNULL
    )
    sandbox = Sandbox(folder)
    while Servers(folder).named(begun) is None or not sandbox.cgroup.processes():
        assert starting.poll() is None
        time.sleep(POLL_S)
    starting.send_signal(signal.SIGKILL)
    starting.wait()
    down(folder)
    assert not sandbox.cgroup.folders
    assert {path.name for path in folder.iterdir()} <= {"logs", "state.json", ".lock"}
    assert str(folder) not in Path("/proc/self/mountinfo").read_text()
    assert "KUBE" not in subprocess.run(["iptables-save"], capture_output=True, text=True, check=True).stdout
    assert [path for path in OUTSIDE if Path(path).exists()] == []
    for number in NETWORKS:
        # A pair whose other end is gone is gone, too.
        interface = Path(f"/sys/class/net/polyreme{number}")
        assert not interface.exists() or (interface / "carrier").read_text().strip() == "1"
