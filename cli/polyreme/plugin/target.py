"""Cluster and namespace of a command: kubectl's own options, kubectl's own defaults."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TypeVar

from polyreme_api.errors import InvalidConfigError
from polyreme_api.labels import LABEL_JOB_UID
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig
from polyreme_cluster.port import ClusterPort

T = TypeVar("T")
DEFAULT_NAMESPACE = "default"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """Where to look."""

    kubeconfig: Path | None = None
    context: str | None = None
    namespace: str | None = None
    """None: the namespace of the context."""
    all_namespaces: bool = False

    @property
    def in_namespace(self) -> str:
        """The namespace that names without one belong to."""
        return self.namespace or _context_namespace(self.kubeconfig, self.context)

    @property
    def listed(self) -> str | None:
        """The namespace to list; None: all of them."""
        return None if self.all_namespaces else self.in_namespace

    def split(self, name: str) -> tuple[str, str]:
        """Read ``NAME``, ``NAMESPACE/NAME`` or ``tj/NAME``, as kubectl takes them."""
        above, _, short = name.rpartition("/")
        if above in {"", "tj", "trainingjob", "trainingjobs", "trainingjob.polyreme.dev", "trainingjobs.polyreme.dev"}:
            return self.in_namespace, short
        return above, short

    def connection(self) -> Connection:
        """Return address and credentials.

        Raises:
            InvalidConfigError: If the kubeconfig can't be used.
        """
        return from_kubeconfig(self.kubeconfig, context=self.context)

    def run(self, work: Callable[[ClusterPort], Awaitable[T]]) -> T:
        """Open the cluster, and do what a command does there."""

        async def story() -> T:
            async with KubernetesCluster(self.connection(), selectors={"Lease": LABEL_JOB_UID}) as cluster:
                return await work(cluster)

        return asyncio.run(story())


def _context_namespace(path: Path | None, context: str | None) -> str:
    from kubernetes.config import ConfigException, list_kube_config_contexts

    try:
        contexts, active = list_kube_config_contexts(config_file=None if path is None else str(path))
    except (ConfigException, OSError, TypeError) as error:
        raise InvalidConfigError(f"kubeconfig can't be used: {error}", field="KUBECONFIG or --kubeconfig") from error
    chosen = active if context is None else next((entry for entry in contexts if entry["name"] == context), None)
    if chosen is None:
        names = ", ".join(entry["name"] for entry in contexts) or "none"
        raise InvalidConfigError(f"no context {context!r} in the kubeconfig, there are: {names}", field="--context")
    return str((chosen.get("context") or {}).get("namespace") or DEFAULT_NAMESPACE)
