"""Nodes that are ready and yet fail pods: a kubelet that rejects them, and a runtime that starts none."""

import contextlib
import json
import os
import signal
from collections.abc import Iterator

from polyreme_operator.types.resources import quantity
from tests.nodes.cluster import Cluster, Manifest
from tools.cluster.nodes.images import image_name
from tools.cluster.nodes.node import STATIC_PODS
from tools.cluster.servers import Servers

REQUEST_M = 200
"""Thousandths of a core that a worker's container requests, so that a kubelet has to find them."""
LEFT_M = REQUEST_M // 2


@contextlib.contextmanager
def rejecting(cluster: Cluster, node: str, job: str) -> Iterator[None]:
    """Have a kubelet reject pods of a job with ``OutOfcpu``: it runs a pod that the API server does not know.

    That pod is static, in a namespace that does not exist. A static pod is critical, so the kubelet makes room for it.

    Args:
        cluster: Where.
        node: Which kubelet.
        job: Whose pods' own requests are not left free.
    """
    assert cluster.folder is not None, "needs the folder of a kubelet"
    path = cluster.folder / node / STATIC_PODS / "unseen.json"
    path.write_text(json.dumps(_unseen(_free_m(cluster, node, job) - LEFT_M)))
    try:
        cluster.until(lambda: _has_unseen(cluster, node), f"the kubelet of {node} runs the pod that is not seen")
        yield
    finally:
        path.unlink()
        cluster.until(lambda: not _has_unseen(cluster, node), f"the kubelet of {node} has ended it")


@contextlib.contextmanager
def starting_nothing(cluster: Cluster, node: str) -> Iterator[None]:
    """Stop a node's container runtime where it is: its kubelet continues, and new pods stay pending."""
    assert cluster.folder is not None, "needs the processes of a node"
    runtime = Servers(cluster.folder).named(f"{node}-containerd")
    assert runtime is not None
    os.kill(runtime.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(runtime.pid, signal.SIGCONT)


def _unseen(cpu_m: int) -> Manifest:
    container = {
        "name": "main",
        "image": image_name("pause"),
        "imagePullPolicy": "Never",
        "resources": {"requests": {"cpu": f"{cpu_m}m"}},
    }
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "unseen", "namespace": "does-not-exist"},
        "spec": {"containers": [container], "terminationGracePeriodSeconds": 0},
    }


def _free_m(cluster: Cluster, node: str, job: str) -> int:
    """Return the thousandths of a core of a node that no pod but the job's requests."""
    offered = cluster.get("node", node)["status"]["allocatable"]["cpu"]
    pods = cluster.get("pods", "--all-namespaces", "--field-selector", f"spec.nodeName={node}")["items"]
    others = [pod for pod in pods if (pod["metadata"].get("labels") or {}).get("polyreme.dev/job") != job]
    wanted = [
        ((container.get("resources") or {}).get("requests") or {}).get("cpu", "0")
        for pod in others
        for container in pod["spec"]["containers"]
    ]
    return quantity(offered, "cpu") - sum(quantity(each, "cpu") for each in wanted)


def _has_unseen(cluster: Cluster, node: str) -> bool:
    held = json.loads(cluster.kubectl("get", "--raw", f"/api/v1/nodes/{node}/proxy/pods"))["items"] or ()
    return any(
        pod["metadata"]["name"].startswith("unseen") and pod.get("status", {}).get("phase") != "Failed" for pod in held
    )
