"""Node agents of the release, which each read a host tree of this machine, and faults that a test writes into one.

No program can write into the kernel log in the kernel's name.
"""

import contextlib
import functools
import http.server
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from polyreme_api.node_report import CONDITION_AGENT
from polyreme_operator.health.record import HEALTH
from tests.nodes.cluster import Cluster
from tests.nodes.release import DEVICES, SYSTEM, Job, Release, is_true, production_values
from tests.nodes.servers import Outside
from tests.nodes.story import EVERY_STEPS
from tests.unit.agent.host_tree import XID_79, record, write

NAMESPACE = "polyreme-agents"
EXPORTER_PORT = 9400
"""That of dcgm-exporter."""
FAULT_S_MAX = 30.0
"""From the record in the kernel log to the taint."""
REPAIRS = "node-repairs"
PRIVILEGED = {"pod-security.kubernetes.io/enforce": "privileged"}
BOOT_ID = "proc/sys/kernel/random/boot_id"
REBOOTED = "rebooted"
POLICY: dict[str, Any] = {
    "apiVersion": "polyreme.dev/v1alpha1",
    "kind": "NodeFaultPolicy",
    "metadata": {"name": "gpus"},
    "spec": {"mode": "Enforce", "classes": ["gpu-lost"], "probation": {"loadedSeconds": 2}},
}
HOOKS = {"hooks": [{"action": "Reboot", "template": "reboot", "deadlineSeconds": 60}]}
REBOOT = f"""
from pathlib import Path
Path("/host/dev/kmsg").write_text("")
Path("/host/{BOOT_ID}").write_text("{REBOOTED}\\n")
"""
"""What a boot changes of a host tree."""


class Exporter(http.server.BaseHTTPRequestHandler):
    """A DCGM exporter whose GPU has no fault: without it a node without NVIDIA's driver proves nothing."""

    def do_GET(self) -> None:
        """Show the metrics of one GPU."""
        page = b'DCGM_FI_DEV_ROW_REMAP_FAILURE{pci_bus_id="00000000:3B:00.0"} 0\n'
        self.send_response(http.HTTPStatus.OK)
        self.send_header("Content-Length", str(len(page)))
        self.end_headers()
        self.wfile.write(page)

    def log_message(self, *_: object) -> None:
        """Print nothing."""


def values_with_agents(cluster: Cluster, servers: Outside) -> dict[str, Any]:
    """Values of the production profile with agents that read host trees."""
    assert cluster.folder is not None, "the agents of a cluster that KUBECONFIG names read their own hosts"
    agent = {
        "enabled": True,
        "args": ["--root=/injected", f"--dcgm={cluster.gateway}:{EXPORTER_PORT}"],
        "volumes": [{"name": "injected", "hostPath": {"path": str(cluster.folder / "hosts")}}],
        "volumeMounts": [{"name": "injected", "mountPath": "/injected", "subPathExpr": "$(NODE_NAME)"}],
    }
    found = production_values(cluster, servers.values(), agent=agent)
    found["operator"]["repairs"] = {"enabled": True, "namespace": REPAIRS}
    return found


@contextlib.contextmanager
def agents(cluster: Cluster, release: Release, servers: Outside) -> Iterator[Path]:
    """The host trees of the nodes, by name, while the release has agents, and a policy acts on what they report."""
    assert cluster.folder is not None
    folder = cluster.folder / "hosts"
    names = [node["metadata"]["name"] for node in cluster.get("nodes")["items"]]
    for name in names:
        write(folder / name, BOOT_ID, f"boot-of-{name}\n")
        write(folder / name, "dev/kmsg", "")
        cluster.offer(name, DEVICES)
    metadata = {"name": REPAIRS, "labels": PRIVILEGED}
    cluster.kubectl.apply([{"apiVersion": "v1", "kind": "Namespace", "metadata": metadata}])
    exporter = http.server.ThreadingHTTPServer((cluster.gateway, EXPORTER_PORT), Exporter)
    threading.Thread(target=exporter.serve_forever, daemon=True).start()
    release.install(values_with_agents(cluster, servers))
    cluster.kubectl("--namespace", NAMESPACE, "rollout", "status", "daemonset/polyreme-agent", "--timeout=50s")
    for name in names:
        cluster.until(functools.partial(condition, cluster, name, CONDITION_AGENT), f"the agent of {name} reports")
    cluster.kubectl.apply([POLICY])
    try:
        yield folder
    finally:
        exporter.shutdown()
        exporter.server_close()
        cluster.kubectl("delete", "nodefaultpolicy", "gpus")
        for name in names:
            if HEALTH in taints(cluster, name):
                cluster.kubectl("taint", "node", name, f"{HEALTH}-")


def lose_gpu(cluster: Cluster, hosts: Path, training: Job) -> str:
    """Lose a GPU of a node on which a job trains, wait until it trains elsewhere, and return the node's name."""
    training.until(lambda status: status.get("step", 0) > EVERY_STEPS and is_true(status, "Running"), "it trains")
    faulty, healthy = (str(pod["spec"]["nodeName"]) for pod in training.pods)
    attempt = training.status["attempt"]["number"]
    cluster.offer(healthy, 2 * DEVICES)
    uptime_us = int(time.clock_gettime(time.CLOCK_MONOTONIC) * 1e6)
    with (hosts / faulty / "dev/kmsg").open("a") as log:
        log.write(record(1, XID_79, at_us=uptime_us))
    cluster.until(lambda: taints(cluster, faulty).get(HEALTH), "the taint", patience_s=FAULT_S_MAX)
    assert taints(cluster, faulty)[HEALTH] == "gpu-lost"
    assert HEALTH not in taints(cluster, healthy)
    training.until(
        lambda status: is_true(status, "Running") and status["attempt"]["number"] > attempt, "it trains again"
    )
    alive = [pod for pod in training.pods if "deletionTimestamp" not in pod["metadata"]]
    assert {pod["spec"]["nodeName"] for pod in alive} == {healthy}
    return faulty


def repair(cluster: Cluster, hosts: Path, faulty: str) -> None:
    """Let a hook boot the node, start its agent again, as a boot does, and wait until the node is on probation."""
    operator = cluster.get("--namespace", SYSTEM, "deployment", "polyreme-operator")["spec"]["template"]["spec"]
    hook = {
        "name": "reboot",
        "image": operator["containers"][0]["image"],
        "command": ["python", "-c", REBOOT],
        "securityContext": {"runAsUser": 0},
        "volumeMounts": [{"name": "host", "mountPath": "/host", "subPathExpr": "$(POLYREME_NODE)"}],
    }
    spec = {"containers": [hook], "volumes": [{"name": "host", "hostPath": {"path": str(hosts)}}]}
    template = {"apiVersion": "v1", "kind": "PodTemplate", "metadata": {"name": "reboot", "namespace": REPAIRS}}
    cluster.kubectl.apply([template | {"template": {"spec": spec}}])
    cluster.kubectl.apply([POLICY | {"spec": {**POLICY["spec"], "repairs": HOOKS}}])
    boot_id = hosts / faulty / BOOT_ID
    cluster.until(lambda: boot_id.read_text().strip() == REBOOTED, "the hook boots the node")
    its_agent = ("pods", "-l", "app.kubernetes.io/name=polyreme-agent", f"--field-selector=spec.nodeName={faulty}")
    cluster.kubectl("--namespace", NAMESPACE, "delete", *its_agent, "--force", "--grace-period=0")
    cluster.until(lambda: record_of(cluster, faulty).get("state") == "probation", "the node is on probation")


def record_of(cluster: Cluster, node: str) -> dict[str, Any]:
    """The record of a node's health; empty if it has none."""
    found: dict[str, Any] = json.loads(cluster.get("node", node)["metadata"]["annotations"].get(HEALTH) or "{}")
    return found


def condition(cluster: Cluster, node: str, kind: str) -> dict[str, Any] | None:
    """A condition of a node."""
    found = cluster.get("node", node)["status"]["conditions"]
    return next((each for each in found if each["type"] == kind), None)


def taints(cluster: Cluster, node: str) -> dict[str, str]:
    """The taints of a node."""
    return {each["key"]: each.get("value", "") for each in cluster.get("node", node)["spec"].get("taints") or ()}
