"""The agent's account, with real bound tokens: conditions of polyreme.dev on its own node, and nothing else."""

from __future__ import annotations

import base64
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from polyreme_agent.ledger import Condition
from polyreme_agent.node_status import NodeStatus, Server, WriteError
from polyreme_agent.publisher import Publisher
from polyreme_api.node_report import CONDITION_AGENT
from tests.cluster.kube import POLL_S, READY_S, ROOT, kubectl

NAMESPACE, ACCOUNT = "polyreme-agents", "polyreme-agent"
OWN, OTHER = "agent-own", "agent-other"
WORKS = Condition(type=CONDITION_AGENT, status="False", reason="Works", message="Collectors: kernel-log works")


@pytest.fixture(scope="module")
def server(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The API server, by a token that is bound to a pod on the node ``agent-own``."""
    folder = tmp_path_factory.mktemp("agent")
    kubectl(kubeconfig, "apply", "-k", str(ROOT / "manifests/agent"))
    for node in (OWN, OTHER):
        _create(kubeconfig, folder, {"apiVersion": "v1", "kind": "Node", "metadata": {"name": node}})
    container = {"name": "reporter", "image": "polyreme/operator"}
    pod = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "bound", "namespace": NAMESPACE},
        "spec": {"serviceAccountName": ACCOUNT, "nodeName": OWN, "containers": [container]},
    }
    _create(kubeconfig, folder, pod)
    try:
        uid = kubectl(kubeconfig, "-n", NAMESPACE, "get", "pod", "bound", "-o", "jsonpath={.metadata.uid}")
        bound = ("--bound-object-kind", "Pod", "--bound-object-name", "bound", "--bound-object-uid", uid)
        yield _server(kubeconfig, folder / "bound", *bound)
    finally:
        kubectl(kubeconfig, "delete", "node", OWN, OTHER, "--ignore-not-found")
        kubectl(kubeconfig, "delete", "-k", str(ROOT / "manifests/agent"), "--wait=false", "--ignore-not-found")
        kubectl(
            kubeconfig, "-n", NAMESPACE, "delete", "pod", "--all", "--force", "--grace-period=0", "--ignore-not-found"
        )


def _create(kubeconfig: str, folder: Path, manifest: dict[str, Any]) -> None:
    path = folder / f"{manifest['kind']}-{manifest['metadata']['name']}.json"
    path.write_text(json.dumps(manifest))
    kubectl(kubeconfig, "create", "-f", str(path))


def _server(kubeconfig: str, folder: Path, *bound: str) -> Server:
    folder.mkdir()
    cluster = yaml.safe_load(Path(kubeconfig).read_text())["clusters"][0]["cluster"]
    authority = folder / "ca.crt"
    data = cluster.get("certificate-authority-data")
    authority.write_bytes(base64.b64decode(data) if data else Path(cluster["certificate-authority"]).read_bytes())
    (folder / "token").write_text(kubectl(kubeconfig, "-n", NAMESPACE, "create", "token", ACCOUNT, *bound))
    url = urlsplit(cluster["server"])
    return Server(host=url.hostname or "", port=url.port or 443, token=folder / "token", authority=authority)


def _body(*conditions: Condition) -> dict[str, Any]:
    return Publisher(0.0).body(conditions, 1_700_000_000.0)


def _refusal(server: Server, node: str, body: dict[str, Any], *, until: str) -> str:
    """Return how a write is refused; a policy that was just applied takes effect a moment later."""
    end_s = time.monotonic() + READY_S
    while True:
        status = NodeStatus(server, node)
        try:
            status.patch(body)
            said = "stored"
        except WriteError as error:
            said = str(error)
        finally:
            status.close()
        if until in said or time.monotonic() > end_s:
            return said
        time.sleep(POLL_S)


def test_it_writes_its_own_nodes_conditions_and_learns_what_is_stored(server: Server) -> None:
    refused = "bound to, and to no other"
    assert refused in _refusal(server, OTHER, _body(WORKS), until=refused)
    status = NodeStatus(server, OWN)
    stored = status.patch(_body(WORKS))
    assert stored[CONDITION_AGENT] == ("False", WORKS.message)
    status.close()


@pytest.mark.parametrize(
    ("body", "sentence"),
    [
        ({"status": {"conditions": [{"type": "Ready", "status": "False"}]}}, "conditions of polyreme.dev only"),
        ({"status": {"conditions": [{"type": "polyreme.dev/Other", "status": "True"}]}}, "its seven conditions"),
        (_body(Condition(type=CONDITION_AGENT, status="True", reason="R", message="x" * 1025)), "at most 1,024"),
        ({"status": {"capacity": {"nvidia.com/gpu": "99"}}}, "no other field of the status"),
        ({"metadata": {"labels": {"a": "b"}}}, "changes no metadata"),
        ({"metadata": {"annotations": {"polyreme.dev/health": "{}"}}}, "changes no metadata"),
    ],
)
def test_anything_else_on_its_own_node_is_refused(server: Server, body: dict[str, Any], sentence: str) -> None:
    assert sentence in _refusal(server, OWN, body, until=sentence)


def test_a_token_without_a_node_is_refused(server: Server, kubeconfig: str, tmp_path: Path) -> None:
    unbound = _server(kubeconfig, tmp_path / "unbound")
    sentence = "bound to, and to no other"
    assert sentence in _refusal(unbound, OWN, _body(WORKS), until=sentence)


def test_it_can_neither_read_nor_write_anything_else(server: Server, kubeconfig: str) -> None:
    account = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
    listed = kubectl(kubeconfig, "auth", "can-i", "--list", "--as", account, "--no-headers")
    rights = {line.split()[0] for line in listed.splitlines() if not line.startswith(" ")}
    assert "nodes/status" in rights
    assert not {"nodes", "pods", "secrets", "leases.coordination.k8s.io"} & rights
