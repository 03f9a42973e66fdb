"""The operator's rights are enough (test_operator_launch.py runs with them) and no more than what it calls."""

from itertools import product
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster.kube import ROOT, kubectl
from tests.cluster.operators import ACCOUNT, NAMESPACE, install

ACCOUNT_NAME = f"system:serviceaccount:{NAMESPACE}:{ACCOUNT}"
NEVER = (
    ("get", "secrets"),
    ("list", "secrets"),
    ("get", "pods/log"),
    ("create", "pods/exec"),
    ("create", "pods/eviction"),
    ("create", "pods/binding"),
    ("patch", "pods"),
    ("patch", "nodes/status"),
    ("update", "nodes"),
    ("delete", "nodes"),
    ("patch", "nodefaultpolicies.polyreme.dev"),
    ("patch", "nodeincidents.polyreme.dev"),
    ("watch", "nodeincidents.polyreme.dev"),
    ("create", "trainingjobs.polyreme.dev"),
    ("patch", "trainingjobs.polyreme.dev"),
    ("update", "trainingjobs.polyreme.dev"),
    ("patch", "trainingqueues.polyreme.dev"),
    ("list", "configmaps"),
    ("delete", "leases.coordination.k8s.io"),
    ("escalate", "roles.rbac.authorization.k8s.io"),
    ("bind", "roles.rbac.authorization.k8s.io"),
    ("update", "roles.rbac.authorization.k8s.io"),
    ("create", "clusterrolebindings.rbac.authorization.k8s.io"),
    ("impersonate", "users"),
    ("get", "customresourcedefinitions.apiextensions.k8s.io"),
    ("list", "namespaces"),
)


def roles() -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "manifests/rbac.yaml").read_text())
    return [document for document in documents if document["kind"] in {"Role", "ClusterRole"}]


def may(kubeconfig: str, verb: str, resource: str, *where: str) -> bool:
    """Ask the API server what the account may do."""
    try:
        said = kubectl(kubeconfig, "auth", "can-i", verb, resource, "--as", ACCOUNT_NAME, *where)
    except AssertionError as error:
        # kubectl exits with 1 for a no, and prints it.
        if not str(error).strip().endswith("failed:") and "Warning" not in str(error):
            raise
        return False
    return said.strip() == "yes"


def test_no_rule_has_a_wildcard() -> None:
    for role in roles():
        for rule in role["rules"]:
            assert all("*" not in entry for values in rule.values() for entry in values), role["metadata"]["name"]


def test_the_server_grants_what_the_manifest_says(kubeconfig: str, tmp_path: Path) -> None:
    install(kubeconfig, tmp_path)
    (role,) = (role for role in roles() if role["kind"] == "ClusterRole" and role["metadata"]["name"] == ACCOUNT)
    for rule in role["rules"]:
        for group, resource, verb in product(rule["apiGroups"], rule["resources"], rule["verbs"]):
            name, _, subresource = resource.partition("/")
            asked = f"{name}.{group}" if group else name
            options = ["--all-namespaces", *([f"--subresource={subresource}"] if subresource else [])]
            assert may(kubeconfig, verb, asked, *options), (verb, resource)


@pytest.mark.parametrize(("verb", "resource"), NEVER)
def test_beyond_that_it_may_nothing(kubeconfig: str, tmp_path: Path, verb: str, resource: str) -> None:
    install(kubeconfig, tmp_path)
    name, _, subresource = resource.partition("/")
    options = [f"--subresource={subresource}"] if subresource else []
    assert not may(kubeconfig, verb, name, "--namespace", "default", *options)


def test_the_whole_installation_is_taken_by_kubectl(kubeconfig: str) -> None:
    for arguments in (("-f", "manifests"), ("-k", "manifests"), ("-k", "manifests/crds")):
        said = kubectl(kubeconfig, "apply", "--dry-run=server", arguments[0], str(ROOT / arguments[1]))
        assert "trainingjobs.polyreme.dev" in said
