"""The ClusterTopology ``default``, for as long as some tests need it."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from kubernetes import client
from kubernetes.client import ApiException

from polyreme_api import labels

_WHERE = (labels.GROUP, labels.VERSION, "clustertopologies")


@contextlib.contextmanager
def default_topology(api: Any, levels: Mapping[str, str]) -> Iterator[None]:
    """Have a topology with these levels, top to bottom, each with its label."""
    objects: Any = client.CustomObjectsApi(api)
    body = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_TOPOLOGY,
        "metadata": {"name": "default"},
        "spec": {"levels": [{"name": name, "nodeLabel": label} for name, label in levels.items()]},
    }
    objects.create_cluster_custom_object(*_WHERE, body)
    try:
        yield
    finally:
        with contextlib.suppress(ApiException):
            objects.delete_cluster_custom_object(*_WHERE, "default")
