"""This machine as nodes of a Kubernetes cluster: pods that are bound here run as processes, and data are made here.

For laptops, tests and machines without a container runtime. A pod's image is not looked at; its command is.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import secrets
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from polyreme.local_run.store_variables import store_variables
from polyreme.run_files.paths import Home
from polyreme.views.output import note
from polyreme_api import environment as names
from polyreme_api.errors import InvalidConfigError
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.port import ClusterPort, Manifest, NotFoundError, ObjectRef, PortError
from polyreme_datahub_service.controller import DataController
from polyreme_datahub_service.preparation import LocalPreparation
from polyreme_local.kubelet.kubelet import ProcessKubelet
from polyreme_local.kubelet.leader_sockets import LeaderSockets
from polyreme_local.kubelet.settings import KubeletSettings
from polyreme_system.clock import SystemClock

if TYPE_CHECKING:
    from kubernetes.client import ApiClient

HEARTBEAT_S = 10.0
TOKEN_S = 3600
"""Life of a pod's token; the API server takes no less than 600 s."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class NodeSettings:
    """How the command was called."""

    nodes: tuple[str, ...]
    devices: int
    """Of each node."""
    resource: str
    labels: Mapping[str, Mapping[str, str]]
    """Labels by node."""
    kubeconfig: Path | None
    context: str | None
    namespace: str | None
    """Whose data are made here; None: every namespace's."""


def serve_nodes(home: Home, settings: NodeSettings) -> None:
    """Join the cluster and serve until a signal to stop.

    Raises:
        InvalidConfigError: If the kubeconfig is of no use.
        PortError: If the cluster does not answer at the start.
    """
    home.prepare_data()
    asyncio.run(_until_stopped(_Host(home, settings)))


async def _until_stopped(host: _Host) -> None:
    """Serve until SIGINT or SIGTERM: both let the nodes leave in order."""
    work = asyncio.ensure_future(host.run())
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


class _Host:
    def __init__(self, home: Home, settings: NodeSettings) -> None:
        self._home, self._settings = home, settings
        self._clock = SystemClock()
        self._api = _client(settings)

    async def run(self) -> None:
        """Serve all nodes until cancelled; they leave the cluster with us."""
        connection = from_kubeconfig(self._settings.kubeconfig, context=self._settings.context)
        async with KubernetesCluster(connection) as cluster:
            await cluster.list("Node", limit=1)
            leaders = LeaderSockets()
            kubelets = [self._kubelet(cluster, node, leaders) for node in self._settings.nodes]
            # Another cluster's jobs may have their data in this home, too.
            cluster_name = hashlib.sha256(connection.url.encode()).hexdigest()[:12]
            scope = f"node-{cluster_name}/{self._settings.namespace or '*'}"
            preparation = LocalPreparation(self._home, scope=scope)
            data = DataController(cluster, preparation, self._clock, namespace=self._settings.namespace, jobs_max=1)
            resource, count = self._settings.resource, self._settings.devices
            note(f"nodes {', '.join(self._settings.nodes)} have joined, with {count} {resource} each; Ctrl-C ends them")
            try:
                async with asyncio.TaskGroup() as tasks:
                    for kubelet in kubelets:
                        tasks.create_task(kubelet.run())
                    tasks.create_task(data.run())
            finally:
                await asyncio.shield(self._leave(cluster))

    def _kubelet(self, cluster: ClusterPort, node: str, leaders: LeaderSockets) -> ProcessKubelet:
        authority = self._api.configuration.ssl_ca_cert
        variables = {
            **store_variables(self._home),
            names.OBJECTS_URL: self._home.objects_url,
            "OMP_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
        }
        return ProcessKubelet(
            cluster,
            KubeletSettings(
                node=node,
                devices=self._settings.devices,
                directory=self._home.path / "nodes" / node,
                run_token=secrets.token_hex(16),
                api_url=str(self._api.configuration.host),
                token_for=self._token,
                device_resource=self._settings.resource,
                # In a cluster the authority lies in the pod; a process finds it by OpenSSL's own variable.
                variables=variables | ({} if authority is None else {"SSL_CERT_FILE": str(authority)}),
                heartbeat_s=HEARTBEAT_S,
                node_labels=self._settings.labels.get(node, {}),
            ),
            clock=self._clock,
            leaders=leaders,
        )

    def _token(self, pod: Manifest) -> str:
        """Ask for a token of the pod's service account, bound to the pod, as a kubelet does."""
        from kubernetes.client import CoreV1Api

        metadata, account = pod["metadata"], pod["spec"].get("serviceAccountName") or "default"
        bound = {"apiVersion": "v1", "kind": "Pod", "name": metadata["name"], "uid": metadata["uid"]}
        request = {"spec": {"expirationSeconds": TOKEN_S, "boundObjectRef": bound}}
        core: Any = CoreV1Api(self._api)
        answer = core.create_namespaced_service_account_token(account, metadata["namespace"], request)
        return str(answer.status.token)

    async def _leave(self, cluster: ClusterPort) -> None:
        for name in self._settings.nodes:
            ref = ObjectRef(kind="Node", name=name)
            try:
                node = await cluster.get(ref)
                await cluster.delete(ref, uid=node["metadata"]["uid"])
            except NotFoundError:
                continue
            except PortError as error:
                note(f"node {name} stays registered: {error}")


def parse_labels(nodes: Sequence[str], texts: Sequence[str]) -> dict[str, dict[str, str]]:
    """Read ``KEY=VALUE`` (of all nodes) and ``NODE:KEY=VALUE`` (of one).

    Raises:
        InvalidConfigError: Naming the text.
    """
    found: dict[str, dict[str, str]] = {node: {} for node in nodes}
    for text in texts:
        key, equals, value = text.partition("=")
        node, colon, name = key.partition(":")
        if not equals or not key or (colon and node not in found):
            raise InvalidConfigError(
                f"not a label: {text!r}, expected KEY=VALUE or NODE:KEY=VALUE with a node of --name", field="--label"
            )
        for one in (node,) if colon else tuple(nodes):
            found[one][name if colon else key] = value
    return found


def _client(settings: NodeSettings) -> ApiClient:
    from kubernetes.config import ConfigException, new_client_from_config

    path = None if settings.kubeconfig is None else str(settings.kubeconfig)
    try:
        client: ApiClient = new_client_from_config(config_file=path, context=settings.context)
    except (ConfigException, OSError) as error:
        raise InvalidConfigError(f"kubeconfig can't be used: {error}", field="--kubeconfig or KUBECONFIG") from error
    return client
