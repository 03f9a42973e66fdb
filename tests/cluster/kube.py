"""The cluster under test: the one that KUBECONFIG names, the one that is up in this checkout, or one of our own.

Each of several processes of pytest has one of its own: an operator takes a whole cluster for itself.
"""

import base64
import contextlib
import functools
import json
import os
import secrets
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import yaml
from kubernetes import client, config
from kubernetes.client import ApiException

from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig
from polyreme_cluster.forwarding_port import ForwardingPort
from polyreme_cluster.port import CLUSTER_SCOPED, PAGE_OBJECTS, ClusterPort, ListPage, Manifest, ObjectRef, WatchEvent
from tests.contract.adapters import Harness
from tools.cluster.binaries import client_path, missing_programs
from tools.cluster.cluster import FOLDER, down, named_cluster, up
from tools.cluster.servers import Servers

ROOT = Path(__file__).parents[2]
WORKER_VARIABLE = "PYTEST_XDIST_WORKER"
READY_S = 60.0
POLL_S = 0.02
LONG_GONE = 1
"""Resource version that no cluster keeps: the test cluster spends some before its API server starts."""

_named: dict[str, str] = {}


@contextlib.contextmanager
def cluster_for_tests() -> Iterator[str]:
    """Yield the kubeconfig of a cluster that has our CRDs; what this starts it also stops.

    Raises:
        AssertionError: If there is none and none can be had: these tests never skip.
    """
    folder = ROOT / FOLDER / os.environ.get(WORKER_VARIABLE, "")
    ours = named_cluster(folder, os.environ) is None and not Servers(folder).are_up
    if ours and (missing := missing_programs(os.environ)):
        raise AssertionError(
            f"no cluster, and {', '.join(missing)} not built: `make cluster-up` builds them once, in about 6 minutes; "
            "or name a cluster by KUBECONFIG"
        )
    try:
        kubeconfig = up(folder, os.environ)
        apply_crds(kubeconfig)
        _named["kubeconfig"] = kubeconfig
        yield kubeconfig
    finally:
        if ours:
            down(folder)


def named_kubeconfig() -> str:
    """Return the path of the kubeconfig of the cluster under test, for suites that take no fixture."""
    return _named["kubeconfig"]


def api_client(kubeconfig: str) -> Any:
    """Return the library's client, with which tests prepare things: another one than that under test."""
    return config.new_client_from_config(config_file=kubeconfig)


def kubectl(kubeconfig: str, *arguments: str) -> str:
    """Run kubectl and return what it prints.

    Raises:
        AssertionError: If it fails.
        BuildError: If there is no kubectl.
    """
    program = client_path("kubectl", os.environ)
    done = subprocess.run(
        [program, "--kubeconfig", kubeconfig, *arguments], capture_output=True, text=True, check=False, timeout=READY_S
    )
    assert done.returncode == 0, f"kubectl {' '.join(arguments)} failed: {done.stderr}"
    return done.stdout


def authority(kubeconfig: str) -> str:
    """Return the certificate of the cluster's authority, which each namespace has."""
    path = r"jsonpath={.data.ca\.crt}"
    return kubectl(kubeconfig, "get", "configmap", "kube-root-ca.crt", "-n", "default", "-o", path)


def apply_crds(kubeconfig: str) -> None:
    """Create or replace our CRDs and wait until they are served."""
    with api_client(kubeconfig) as api:
        extensions: Any = client.ApiextensionsV1Api(api)
        for path in sorted((ROOT / "manifests/crds").glob("*.yaml")):
            wanted = yaml.safe_load(path.read_text())
            name = wanted["metadata"]["name"]
            try:
                extensions.create_custom_resource_definition(wanted)
            except ApiException as error:
                if error.status != 409:
                    raise
                known = extensions.read_custom_resource_definition(name)
                wanted["metadata"]["resourceVersion"] = known.metadata.resource_version
                extensions.replace_custom_resource_definition(name, wanted)
            until(functools.partial(_is_established, extensions, name), f"CRD {name} is served")


def until(holds: Callable[[], bool], what: str, *, timeout_s: float = READY_S) -> None:
    """Poll until something holds."""
    deadline_s = time.monotonic() + timeout_s
    while not holds():
        assert time.monotonic() < deadline_s, f"never: {what}"
        time.sleep(POLL_S)


@contextlib.contextmanager
def new_namespace(api: Any) -> Iterator[str]:
    """Make a namespace with all that controllers put into it, and let it be deleted after the test."""
    core: Any = client.CoreV1Api(api)
    name = f"polyreme-test-{secrets.token_hex(4)}"
    core.create_namespace({"metadata": {"name": name}})
    try:
        until(lambda: _exists(core.read_namespaced_service_account, "default", name), f"service account of {name}")
        until(lambda: _exists(core.read_namespaced_config_map, "kube-root-ca.crt", name), f"root certificate of {name}")
        yield name
    finally:
        core.delete_namespace(name)


@contextlib.asynccontextmanager
async def open_kubernetes(folder: Path) -> AsyncIterator[Harness]:
    """Open the adapter for one story of the contract suite, in a namespace of its own."""
    kubeconfig = _named["kubeconfig"]
    with api_client(kubeconfig) as api, new_namespace(api) as namespace:
        async with KubernetesCluster(from_kubeconfig(kubeconfig)) as cluster:
            yield KubernetesHarness(OneNamespace(cluster, namespace))


class InNamespace(ForwardingPort):
    """A cluster that lists and watches one namespace only: the others are none of a test's business."""

    def __init__(self, cluster: ClusterPort, namespace: str) -> None:
        super().__init__(cluster)
        self._namespace = namespace

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        return await super().list(kind, namespace=namespace or self._of(kind), limit=limit, continue_=continue_)

    def watch(self, kind: str, *, resource_version: str, namespace: str | None = None) -> AsyncIterator[WatchEvent]:
        return super().watch(kind, resource_version=resource_version, namespace=namespace or self._of(kind))

    def _of(self, kind: str) -> str | None:
        return None if kind in CLUSTER_SCOPED else self._namespace


class KubernetesHarness:
    """A real API server can't be made to forget: it is asked for what it has forgotten."""

    def __init__(self, cluster: "OneNamespace") -> None:
        self._scoped = cluster
        self.cluster: ClusterPort = cluster

    async def forget_history(self) -> None:
        self._scoped.forgets = True


class OneNamespace(ForwardingPort):
    """A story's view: what it calls ``default`` is a namespace of its own, and that namespace is all there is."""

    def __init__(self, cluster: ClusterPort, namespace: str) -> None:
        super().__init__(cluster)
        self._namespace = namespace
        self.forgets = False
        """Whether versions and tokens from before now are sent as those of a time long gone."""
        self._kept: set[str] = set()

    async def list(
        self, kind: str, *, namespace: str | None = None, limit: int = PAGE_OBJECTS, continue_: str | None = None
    ) -> ListPage:
        if continue_ is not None and self.forgets:
            continue_ = _aged(continue_)
        page = await super().list(kind, namespace=self._real(namespace), limit=limit, continue_=continue_)
        if self.forgets:
            self._kept.add(page.resource_version)
        return ListPage(
            items=[self._seen(item) for item in page.items],
            resource_version=page.resource_version,
            continue_=page.continue_,
        )

    async def watch(
        self, kind: str, *, resource_version: str, namespace: str | None = None
    ) -> AsyncIterator[WatchEvent]:
        if self.forgets and resource_version not in self._kept:
            resource_version = str(LONG_GONE)
        real = self._real(namespace)
        async for event in self._port.watch(kind, resource_version=resource_version, namespace=real):
            yield WatchEvent(type=event.type, object=self._seen(event.object))

    async def get(self, ref: ObjectRef) -> Manifest:
        return self._seen(await super().get(self._ref(ref)))

    async def create(self, manifest: Manifest, *, dry_run: bool = False) -> Manifest:
        metadata = {**manifest["metadata"], "namespace": self._real(manifest["metadata"]["namespace"])}
        return self._seen(await super().create({**manifest, "metadata": metadata}, dry_run=dry_run))

    async def patch(
        self,
        ref: ObjectRef,
        merge_patch: Manifest,
        *,
        resource_version: str | None = None,
        subresource: str | None = None,
    ) -> Manifest:
        result = await super().patch(
            self._ref(ref), merge_patch, resource_version=resource_version, subresource=subresource
        )
        return self._seen(result)

    async def delete(
        self, ref: ObjectRef, *, uid: str, resource_version: str | None = None, grace_period_s: int | None = None
    ) -> None:
        await super().delete(self._ref(ref), uid=uid, resource_version=resource_version, grace_period_s=grace_period_s)

    async def bind(self, ref: ObjectRef, *, uid: str, node: str) -> None:
        await super().bind(self._ref(ref), uid=uid, node=node)

    async def evict(self, ref: ObjectRef, *, uid: str) -> None:
        await super().evict(self._ref(ref), uid=uid)

    def _real(self, namespace: str | None) -> str:
        return self._namespace if namespace in {None, "default"} else f"{self._namespace}-{namespace}"

    def _ref(self, ref: ObjectRef) -> ObjectRef:
        return ObjectRef(kind=ref.kind, namespace=self._real(ref.namespace), name=ref.name)

    def _seen(self, manifest: Manifest) -> Manifest:
        if "namespace" in manifest["metadata"]:
            manifest["metadata"]["namespace"] = "default"
        return manifest


def _aged(token: str) -> str:
    """Return a continue token of the same list as if its first page had been read long ago."""
    padded = token + "=" * (-len(token) % 4)
    content: dict[str, Any] = json.loads(base64.urlsafe_b64decode(padded))
    return base64.urlsafe_b64encode(json.dumps({**content, "rv": LONG_GONE}).encode()).decode().rstrip("=")


def _is_established(extensions: Any, name: str) -> bool:
    conditions = extensions.read_custom_resource_definition(name).status.conditions or []
    return any(condition.type == "Established" and condition.status == "True" for condition in conditions)


def _exists(read: Callable[[str, str], Any], name: str, namespace: str) -> bool:
    try:
        read(name, namespace)
    except ApiException as error:
        if error.status == 404:
            return False
        raise
    return True
