"""Rights of accounts: those that the chart gives, and those that the API server's audit log saw used or refused."""

import functools
import json
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from tests.nodes.cluster import AUDIT_LOG, RESTARTS, Cluster, Manifest
from tests.nodes.release import CHART, SYSTEM

FORBIDDEN = 403
NAMESPACES = (SYSTEM, "polyreme-agents")
"""Of the chart's accounts."""


PRODUCTION = {
    "profile": "production",
    "database": {"url": "postgresql+psycopg2://database:5432/polyreme", "existingSecret": "a"},
    "topics": {"url": "pulsar://broker:6650", "existingSecret": "b"},
    "objectStore": {"url": "s3://bucket", "existingSecret": "c"},
}
LEASES = "coordination.k8s.io/leases"
AFTER_CONFLICTS = ("configmaps", "nodes", "pods")
KINDS = ("clustertopologies", "nodefaultpolicies", "nodeincidents", "trainingjobs", "trainingqueues")
CONFLICT = "an object is read again after a write met a conflict, which is chance"
UNUSED = {
    **{f"polyreme-operator: get {name}": CONFLICT for name in AFTER_CONFLICTS},
    **{f"polyreme-operator: get polyreme.dev/{name}": CONFLICT for name in KINDS},
    "polyreme-operator: delete polyreme.dev/nodeincidents": "only the oldest of 5,000 are deleted",
    f"polyreme-operator: update {LEASES}": "granted to launchers by operators of 0.1.0 until they are replaced",
}
"""Rights that these tests need not use, each with its reason, which is in the chart beside the rule, too."""
REFUSED = {
    f"{account}: {verb} {LEASES}": "an uninstall deletes the rights before the pods have given their Lease back"
    for account in ("polyreme-operator", "polyreme-datahub")
    for verb in ("get", "patch")
} | {
    f"polyreme-operator: list {kind}": "chart 0.1.0 with today's operator, in the test of upgrades"
    for kind in ("limitranges", "node.k8s.io/runtimeclasses", "polyreme.dev/nodeincidents")
}
REFUSED |= {"polyreme-operator: patch nodes/status": "operator.markNodes is off: no conditions of nodes"}
"""Refusals that are expected."""
READER = "metrics-reader"
SCRAPE = """
import urllib.request
for pod in {addresses}:
    request = urllib.request.Request(f"http://{{pod}}:8080/metrics", headers={{"Authorization": "Bearer {token}"}})
    print(urllib.request.urlopen(request, timeout=10).status)
"""


@dataclass(frozen=True, slots=True, order=True, kw_only=True)
class Right:
    """One thing that an account may do or did."""

    account: str
    verb: str
    resource: str
    """Group and resource, such as `polyreme.dev/trainingjobs/status`."""

    def __str__(self) -> str:
        return f"{self.account}: {self.verb} {self.resource}"


def given(helm: Path, values: Sequence[Mapping[str, Any]]) -> set[Right]:
    """Return the rights that the chart gives to accounts of its own, with any of these values."""
    found: set[Right] = set()
    for each in values:
        command: list[str | Path] = [helm, "template", "polyreme", CHART, "--namespace", SYSTEM, "--values", "-"]
        done = subprocess.run(command, input=json.dumps(each), capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        found |= set(_rights([document for document in yaml.safe_load_all(done.stdout) if document]))
    return found


def _rights(documents: Sequence[Mapping[str, Any]]) -> Iterator[Right]:
    rules = {
        (each["kind"], each["metadata"]["name"]): each.get("rules") or ()
        for each in documents
        if each["kind"] in {"Role", "ClusterRole"}
    }
    for binding in documents:
        if binding["kind"] not in {"RoleBinding", "ClusterRoleBinding"}:
            continue
        role = (binding["roleRef"]["kind"], binding["roleRef"]["name"])
        for subject in binding["subjects"]:
            if subject["kind"] == "ServiceAccount" and subject["namespace"] in NAMESPACES:
                for rule in rules[role]:
                    for group in rule.get("apiGroups", ()):
                        for resource in rule.get("resources", ()):
                            for verb in rule["verbs"]:
                                name = f"{group}/{resource}".lstrip("/")
                                yield Right(account=subject["name"], verb=verb, resource=name)


def seen(folder: Path) -> tuple[set[Right], set[Right]]:
    """Return what accounts of the chart used on the cluster of a folder, and what a ready API server refused them."""
    used, refused = set[Right](), set[Right]()
    path = folder / RESTARTS
    restarts = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    for line in (folder / AUDIT_LOG).read_text().splitlines():
        event = json.loads(line)
        account = event["user"]["username"].split(":")
        target = event.get("objectRef") or {}
        if account[:2] != ["system", "serviceaccount"] or account[2] not in NAMESPACES or "resource" not in target:
            continue
        parts = (target.get("apiGroup"), target["resource"], target.get("subresource"))
        right = Right(account=account[3], verb=event["verb"], resource="/".join(part for part in parts if part))
        if event.get("responseStatus", {}).get("code") != FORBIDDEN:
            used.add(right)
        elif not any(began <= event["stageTimestamp"][:19] <= ready for began, ready in restarts):
            refused.add(right)
    return used, refused


def described() -> list[Manifest]:
    """A queue, a topology and a policy that touch no job and no node."""
    quota = {"resource": "example.com/none", "nominal": 1}
    level = {"name": "rack", "nodeLabel": "example.com/rack", "distance": 1}
    policy = {"mode": "Observe", "nodeSelector": {"example.com/none": "true"}, "rules": [], "breaker": {}}
    specs = {
        "TrainingQueue": ("unused", {"quotas": [quota]}),
        "ClusterTopology": ("default", {"levels": [level]}),
        "NodeFaultPolicy": ("unused", policy),
    }
    return [
        {"apiVersion": "polyreme.dev/v1alpha1", "kind": kind, "metadata": {"name": name}, "spec": spec}
        for kind, (name, spec) in specs.items()
    ]


def has_statuses(cluster: Cluster) -> bool:
    """Have the operator write a status of a queue, a topology and a policy."""
    objects = described()
    cluster.kubectl.apply(objects)
    try:
        for each in objects:
            words = (each["kind"].lower(), each["metadata"]["name"])
            cluster.until(functools.partial(_status, cluster, words), f"status of {words}")
        return True
    finally:
        for each in objects:
            cluster.kubectl("delete", each["kind"].lower(), each["metadata"]["name"])


def _status(cluster: Cluster, words: Sequence[str]) -> Any:
    return cluster.get(*words).get("status")


def read_metrics(cluster: Cluster) -> list[str]:
    """Read the metrics of operator and datahub with a token that may, and return the answers' statuses."""
    account = {"kind": "ServiceAccount", "name": READER, "namespace": SYSTEM}
    role = {"apiGroup": "rbac.authorization.k8s.io", "kind": "ClusterRole", "name": "polyreme-metrics-reader"}
    binding = {"apiVersion": "rbac.authorization.k8s.io/v1", "kind": "ClusterRoleBinding", "metadata": {"name": READER}}
    maker = {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": READER, "namespace": SYSTEM}}
    cluster.kubectl.apply([maker, {**binding, "roleRef": role, "subjects": [account]}])
    try:
        token = cluster.kubectl("--namespace", SYSTEM, "create", "token", READER).strip()
        pods = cluster.get("--namespace", SYSTEM, "pods", "--field-selector", "status.phase=Running")["items"]
        names = ("polyreme-operator", "polyreme-datahub")
        named = {
            name: [pod for pod in pods if pod["metadata"]["labels"]["app.kubernetes.io/name"] == name] for name in names
        }
        addresses = [pods[0]["status"]["podIP"] for pods in named.values()]
        asking = named["polyreme-operator"][0]["metadata"]["name"]
        program = SCRAPE.format(addresses=json.dumps(addresses), token=token)
        said = cluster.kubectl("--namespace", SYSTEM, "exec", asking, "--", "python", "-c", program)
        return said.split()
    finally:
        cluster.kubectl("delete", "clusterrolebinding", READER)
        cluster.kubectl("--namespace", SYSTEM, "delete", "serviceaccount", READER)
