"""The operator's rights are enough (test_operator_launch.py runs with them) and no more than what it calls."""

from itertools import product
from typing import Any

import pytest
import yaml

from polyreme_api import labels
from tests.cluster.kube import ROOT, kubectl
from tests.cluster.operators import ACCOUNT, NAMESPACE, install

NEVER = (
    ("get", "secrets"),
    ("list", "secrets"),
    ("patch", "secrets"),
    ("delete", "secrets"),
    ("list", "serviceaccounts"),
    ("patch", "serviceaccounts"),
    ("create", "serviceaccounts/token"),
    ("impersonate", "serviceaccounts"),
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
    ("get", "namespaces"),
    ("patch", "namespaces"),
)


def roles() -> list[dict[str, Any]]:
    documents = yaml.safe_load_all((ROOT / "manifests/rbac.yaml").read_text())
    return [document for document in documents if document["kind"] in {"Role", "ClusterRole"}]


@pytest.fixture(scope="module")
def account(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a kubeconfig with a token of the operator's service account."""
    return str(install(kubeconfig, tmp_path_factory.mktemp("operator")))


def may(account: str, verb: str, resource: str, *where: str) -> bool:
    """Ask the API server what the token may do."""
    try:
        said = kubectl(account, "auth", "can-i", verb, resource, *where)
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


def test_the_server_grants_what_the_manifest_says(account: str) -> None:
    (role,) = (role for role in roles() if role["kind"] == "ClusterRole" and role["metadata"]["name"] == ACCOUNT)
    for rule in role["rules"]:
        for group, resource, verb in product(rule["apiGroups"], rule["resources"], rule["verbs"]):
            name, _, subresource = resource.partition("/")
            asked = f"{name}.{group}" if group else name
            options = ["--all-namespaces", *([f"--subresource={subresource}"] if subresource else [])]
            for narrowed in rule.get("resourceNames", [""]):
                assert may(account, verb, f"{asked}/{narrowed}" if narrowed else asked, *options), (verb, resource)


@pytest.mark.parametrize(("verb", "resource"), NEVER)
def test_beyond_that_it_may_nothing(account: str, verb: str, resource: str) -> None:
    name, _, subresource = resource.partition("/")
    options = [f"--subresource={subresource}"] if subresource else []
    assert not may(account, verb, name, "--namespace", "default", *options)


def test_of_all_secrets_it_reads_the_installations_key_alone(account: str) -> None:
    read = ("--namespace", NAMESPACE, "get", "secret")
    # Whether it exists or not, the answer is no refusal.
    kubectl(account, *read, labels.INSTALLATION_KEY_NAME, "--ignore-not-found")
    for words in ((*read, "of-another"), read, ("--namespace", "default", "get", "secret", "any")):
        with pytest.raises(AssertionError, match="Forbidden"):
            kubectl(account, *words, "--ignore-not-found")


def test_the_whole_installation_is_taken_by_kubectl(kubeconfig: str) -> None:
    for arguments in (("-f", "manifests"), ("-k", "manifests"), ("-k", "manifests/crds")):
        said = kubectl(kubeconfig, "apply", "--dry-run=server", arguments[0], str(ROOT / arguments[1]))
        assert "trainingjobs.polyreme.dev" in said
