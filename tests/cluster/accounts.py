"""Accounts of a real cluster, by real tokens: what they may do, and what the API server answers when they try."""

import json
import urllib.error
import urllib.request
from typing import Any

from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import Manifest
from tests.cluster.kube import kubectl

TOKEN_S = 3600
FORBIDDEN = 403
MERGE = "application/merge-patch+json"
REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"


class Account:
    """A service account, by a token of its own."""

    def __init__(self, kubeconfig: str, namespace: str, name: str, *, pod: Manifest | None = None) -> None:
        self._connection = from_kubeconfig(kubeconfig)
        self.namespace = namespace
        words = ["create", "token", name, "--namespace", namespace, f"--duration={TOKEN_S}s"]
        if pod is not None:
            # As a kubelet asks for it, for the pod that mounts it.
            words += ["--bound-object-kind=Pod", f"--bound-object-name={pod['metadata']['name']}"]
        self._token = kubectl(kubeconfig, *words).strip()

    def ask(self, verb: str, path: str, body: Manifest | None = None, *, kind: str = "") -> tuple[int, Manifest]:
        """Send a request, and return status and body of the answer."""
        headers = {"Authorization": f"Bearer {self._token}", "Accept": "application/json"}
        headers["Content-Type"] = kind or (MERGE if verb == "PATCH" else "application/json")
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self._connection.url + path, data=data, headers=headers, method=verb)
        try:
            with urllib.request.urlopen(request, context=self._connection.tls) as answer:
                return answer.status, json.load(answer)
        except urllib.error.HTTPError as error:
            return error.code, json.load(error)

    def rights(self, namespace: str = "") -> set[tuple[str, str, str]]:
        """Return all rights in a namespace: verb, group and resource, and the name that it is narrowed to."""
        spec = {"spec": {"namespace": namespace or self.namespace}}
        review = {"apiVersion": "authorization.k8s.io/v1", "kind": "SelfSubjectRulesReview", **spec}
        status, answer = self.ask("POST", REVIEWS, review)
        assert status == 201, answer
        assert not answer["status"].get("incomplete"), answer
        found = set()
        for rule in answer["status"]["resourceRules"]:
            for verb in rule["verbs"]:
                for group in rule.get("apiGroups") or [""]:
                    for resource in rule.get("resources") or []:
                        for name in rule.get("resourceNames") or [""]:
                            found.add((verb, f"{group}/{resource}".lstrip("/"), name))
        return found


def paths(namespace: str) -> dict[str, str]:
    """Return the paths of kinds in a namespace."""
    core = {name: f"/api/v1/namespaces/{namespace}/{name}" for name in ("pods", "secrets", "configmaps", "services")}
    groups: dict[str, Any] = {
        "trainingjobs": "polyreme.dev/v1alpha1",
        "leases": "coordination.k8s.io/v1",
        "roles": "rbac.authorization.k8s.io/v1",
        "rolebindings": "rbac.authorization.k8s.io/v1",
    }
    return core | {name: f"/apis/{group}/namespaces/{namespace}/{name}" for name, group in groups.items()}
