"""Objects that every adapter takes."""

from pathlib import Path
from typing import Any

import yaml

from polyreme_cluster.port import Manifest, ObjectRef

SAMPLE = Path(__file__).parents[2] / "manifests/samples/quickstart.yaml"


def lease(name: str = "lease", *, namespace: str = "default", **metadata: Any) -> Manifest:
    return {
        "apiVersion": "coordination.k8s.io/v1",
        "kind": "Lease",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "spec": {"holderIdentity": "a", "leaseDurationSeconds": 15},
    }


def config(
    name: str = "config", *, namespace: str = "default", data: dict[str, str] | None = None, **metadata: Any
) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": name, "namespace": namespace, **metadata},
        "data": data or {},
    }


def pod(name: str = "pod", *, node: str | None = "node-1", grace_s: int = 30, **metadata: Any) -> Manifest:
    spec: dict[str, Any] = {
        "containers": [{"name": "main", "image": "none"}],
        "terminationGracePeriodSeconds": grace_s,
    }
    if node is not None:
        spec["nodeName"] = node
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": spec,
    }


def job(name: str = "job", **metadata: Any) -> Manifest:
    sample: Manifest = yaml.safe_load(SAMPLE.read_text())
    return {**sample, "metadata": {"name": name, "namespace": "default", **metadata}}


def service(name: str = "service", **metadata: Any) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": name, "namespace": "default", **metadata},
        "spec": {"clusterIP": "None", "selector": {"app": "x"}},
    }


def owned_by(owner: Manifest) -> dict[str, Any]:
    """Metadata of an object that ``owner`` owns."""
    reference = {
        "apiVersion": owner["apiVersion"],
        "kind": owner["kind"],
        "name": owner["metadata"]["name"],
        "uid": owner["metadata"]["uid"],
    }
    return {"ownerReferences": [reference]}


def uid(manifest: Manifest) -> str:
    return str(manifest["metadata"]["uid"])


def version(manifest: Manifest) -> str:
    return str(manifest["metadata"]["resourceVersion"])


def ref(manifest: Manifest) -> ObjectRef:
    return ObjectRef.of(manifest)
