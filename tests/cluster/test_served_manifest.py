"""The Deployment of a served model is stored as it is, and its pods are of the restricted level."""

import json
from pathlib import Path

import pytest
import yaml

from tests.cluster.kube import ROOT, api_client, kubectl, new_namespace

MANIFEST = ROOT / "manifests/serving/serve.yaml"

pytestmark = pytest.mark.slow


def test_the_deployment_and_its_pod_are_accepted_at_the_restricted_level(kubeconfig: str, tmp_path: Path) -> None:
    deployment = next(yaml.safe_load_all(MANIFEST.read_text()))
    template = deployment["spec"]["template"]
    pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "serve", **template["metadata"]}}
    (tmp_path / "pod.json").write_text(json.dumps({**pod, "spec": template["spec"]}))
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        kubectl(kubeconfig, "label", "namespace", namespace, "pod-security.kubernetes.io/enforce=restricted")
        for file in (MANIFEST, tmp_path / "pod.json"):
            kubectl(kubeconfig, "-n", namespace, "apply", "--dry-run=server", "--validate=strict", "-f", str(file))
