"""etcd, API server, controller-manager, scheduler and KWOK, each waited for until it says it is well.

All listen on loopback, but for the API server of a cluster with nodes.
"""

import base64
import json
import secrets
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tools.cluster.access import Access
from tools.cluster.servers import Server, Servers, dump, free_ports

HOST = "127.0.0.1"
KUBECONFIG_NAME = "kubeconfig"
READY_S = 120.0
"""Longest wait for one server; a loaded machine takes some seconds."""
REQUEST_S = 5.0
REVISIONS_SPENT = 20
"""Writes to etcd before the API server starts: resource version 1 is then long gone, as in any cluster with a past."""
KWOK_NODES = "kwok.x-k8s.io/node=fake"
"""Nodes with this annotation are KWOK's: they and their pods exist on paper only."""

ADMIN = "admin"
SERVICE_NAMES = ("10.0.0.1", "kubernetes.default.svc", "kubernetes.default", "kubernetes")
"""What pods call the API server."""
LOST_S = 16
"""Silence after which a node is not ready, a third of Kubernetes' own: tests wait for it."""
TOLERATED_S = 20
"""Time that pods stay bound to a lost node, instead of five minutes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ForNodes:
    """What a control plane does differently when its cluster has nodes."""

    address: str
    """Where nodes and pods reach the API server."""
    users: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Groups by name of the users that nodes are."""


class ControlPlane:
    """One control plane in one folder.

    Args:
        folder: Keys, data, logs, kubeconfig.
        programs: Paths of the programs by name.
        servers: Where the processes are written down.
        api_options: Further options of the API server.
        nodes: What nodes need of it, if there are any.
    """

    def __init__(
        self,
        folder: Path,
        programs: Mapping[str, Path],
        servers: Servers,
        *,
        api_options: Sequence[str] = (),
        nodes: ForNodes | None = None,
    ) -> None:
        self._folder, self._programs, self._servers = folder, programs, servers
        self._api_options, self._nodes = api_options, nodes
        self._host = nodes.address if nodes else HOST
        self._ports = dict(zip(("etcd", "peer", "api", "controllers", "scheduler", "kwok"), free_ports(6), strict=True))
        users = (ADMIN, *(nodes.users if nodes else ()))
        self.access = Access(
            url=f"https://{self._host}:{self._ports['api']}",
            keys=folder / "keys",
            tokens={user: secrets.token_hex(16) for user in users},
        )
        self._url = self.access.url
        self._kubeconfig = folder / KUBECONFIG_NAME

    def start(self) -> Path:
        """Start everything and return the path of the kubeconfig.

        Raises:
            ServerError: If a server ends or does not get ready.
        """
        for name in ("keys", "certificates"):
            (self._folder / name).mkdir(parents=True, exist_ok=True, mode=0o700)
        names = (self._host, *SERVICE_NAMES) if self._nodes else ()
        subprocess.run([self._programs["certificate"], self._folder / "keys", *names], check=True)
        self._start_etcd()
        api = self._start_api_server()
        self.access.write_kubeconfig(self._kubeconfig, user=ADMIN)
        controllers = self._start_controllers()
        scheduler = self._start_scheduler()
        kwok = self._start_kwok()
        self._wait(
            controllers, f"https://{HOST}:{self._ports['controllers']}/healthz", what="controller-manager's health"
        )
        self._wait(scheduler, f"https://{HOST}:{self._ports['scheduler']}/healthz", what="scheduler's health")
        self._wait(kwok, f"http://{HOST}:{self._ports['kwok']}/healthz", what="KWOK's health")
        self._wait(
            api, f"{self._url}/api/v1/namespaces/default/serviceaccounts/default", what="default service account"
        )
        return self._kubeconfig

    def _start_etcd(self) -> None:
        url, peer = f"http://{HOST}:{self._ports['etcd']}", f"http://{HOST}:{self._ports['peer']}"
        server = self._servers.start(
            "etcd",
            [
                self._programs["etcd"],
                f"--data-dir={self._folder / 'etcd'}",
                f"--listen-client-urls={url}",
                f"--advertise-client-urls={url}",
                f"--listen-peer-urls={peer}",
                f"--initial-advertise-peer-urls={peer}",
                f"--initial-cluster=default={peer}",
                "--log-level=warn",
                "--quota-backend-bytes=8589934592",
                "--unsafe-no-fsync",
            ],
        )
        self._wait(server, f"{url}/health", what="etcd's health")
        key = base64.b64encode(b"polyreme.dev/past").decode()
        for _ in range(REVISIONS_SPENT):
            _call(f"{url}/v3/kv/put", body={"key": key, "value": ""})
        _call(f"{url}/v3/kv/compaction", body={"revision": REVISIONS_SPENT})

    def _start_api_server(self) -> Server:
        keys = self._folder / "keys"
        tokens = keys / "tokens.csv"
        tokens.touch(mode=0o600)
        groups = {ADMIN: ("system:masters",), **(self._nodes.users if self._nodes else {})}
        rows = [f'{self.access.tokens[user]},{user},{user},"{",".join(of)}"\n' for user, of in groups.items()]
        tokens.write_text("".join(rows))
        server = self._servers.start(
            "kube-apiserver",
            [
                self._programs["kube-apiserver"],
                f"--etcd-servers=http://{HOST}:{self._ports['etcd']}",
                f"--bind-address={self._host}",
                f"--advertise-address={self._host}",
                f"--secure-port={self._ports['api']}",
                f"--cert-dir={self._folder / 'certificates'}",
                f"--tls-cert-file={keys / 'server.crt'}",
                f"--tls-private-key-file={keys / 'server.key'}",
                f"--service-account-key-file={keys / 'accounts.key'}",
                f"--service-account-signing-key-file={keys / 'accounts.key'}",
                "--service-account-issuer=https://kubernetes.default.svc",
                f"--token-auth-file={tokens}",
                "--authorization-mode=Node,RBAC",
                # Two address families; a Service has the first unless it asks for more.
                "--service-cluster-ip-range=10.0.0.0/16,fd00:10::/108",
                *self._options_for_nodes(),
                "--kubelet-preferred-address-types=InternalIP",
                "--allow-privileged=true",
                "--max-requests-inflight=2000",
                "--max-mutating-requests-inflight=1000",
                *self._api_options,
            ],
            # The connections of nodes end with their network, unheard: it would wait for them.
            stop_signal=signal.SIGKILL if self._nodes else signal.SIGTERM,
        )
        self._wait(server, f"{self._url}/readyz", what="API server's readiness")
        return server

    def _options_for_nodes(self) -> list[str]:
        if not self._nodes:
            # Endpoints refuse a loopback address, and nothing here goes through the kubernetes Service.
            return ["--endpoint-reconciler-type=none"]
        keys = self._folder / "keys"
        return [
            "--enable-admission-plugins=NodeRestriction",
            f"--kubelet-client-certificate={keys / 'kubelet-client.crt'}",
            f"--kubelet-client-key={keys / 'kubelet-client.key'}",
            f"--default-not-ready-toleration-seconds={TOLERATED_S}",
            f"--default-unreachable-toleration-seconds={TOLERATED_S}",
        ]

    def _start_controllers(self) -> Server:
        keys = self._folder / "keys"
        return self._servers.start(
            "kube-controller-manager",
            [
                self._programs["kube-controller-manager"],
                f"--kubeconfig={self._kubeconfig}",
                f"--bind-address={HOST}",
                f"--secure-port={self._ports['controllers']}",
                f"--cert-dir={self._folder / 'certificates'}",
                f"--root-ca-file={keys / 'server.crt'}",
                f"--service-account-private-key-file={keys / 'accounts.key'}",
                "--leader-elect=false",
                *([f"--node-monitor-grace-period={LOST_S}s", "--node-monitor-period=2s"] if self._nodes else ()),
                "--kube-api-qps=1000",
                "--kube-api-burst=2000",
            ],
        )

    def _start_scheduler(self) -> Server:
        configuration = dump(
            self._folder / "scheduler.json",
            {
                "apiVersion": "kubescheduler.config.k8s.io/v1",
                "kind": "KubeSchedulerConfiguration",
                "clientConnection": {"kubeconfig": str(self._kubeconfig), "qps": 1000, "burst": 2000},
                "leaderElection": {"leaderElect": False},
            },
        )
        return self._servers.start(
            "kube-scheduler",
            [
                self._programs["kube-scheduler"],
                f"--config={configuration}",
                f"--bind-address={HOST}",
                f"--secure-port={self._ports['scheduler']}",
                f"--cert-dir={self._folder / 'certificates'}",
            ],
        )

    def _start_kwok(self) -> Server:
        stages = self._folder / "stages.yaml"
        stages.write_bytes(subprocess.run([self._programs["stages"]], check=True, capture_output=True).stdout)
        return self._servers.start(
            "kwok",
            [
                self._programs["kwok"],
                f"--kubeconfig={self._kubeconfig}",
                f"--config={stages}",
                "--manage-all-nodes=false",
                f"--manage-nodes-with-annotation-selector={KWOK_NODES}",
                f"--server-address={HOST}:{self._ports['kwok']}",
                "--node-lease-duration-seconds=40",
            ],
        )

    def _wait(self, server: Server, url: str, *, what: str) -> None:
        started_s = time.monotonic()
        print(f"waiting for {what}", end=" ", file=sys.stderr, flush=True)
        self._servers.wait(server, lambda: self._answers(url), what=what, timeout_s=READY_S)
        print(f"{time.monotonic() - started_s:.1f} s", file=sys.stderr, flush=True)

    def _answers(self, url: str) -> bool:
        try:
            if url.startswith(self._url):
                _call(url, token=self.access.tokens[ADMIN], authority=self._folder / "keys/server.crt")
            else:
                _call(url)
        except (OSError, ValueError):
            return False
        return True


def _call(
    url: str, *, token: str | None = None, authority: Path | None = None, body: dict[str, Any] | None = None
) -> None:
    headers = {} if token is None else {"Authorization": f"Bearer {token}"}
    data = None if body is None else json.dumps(body).encode()
    context = ssl.create_default_context(cafile=authority)
    if authority is None:
        # A health page of the controller-manager or the scheduler, which sign their own; no secret is sent.
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context))
    request = urllib.request.Request(url, data=data, headers=headers)  # noqa: S310 - loopback addresses of our own
    with opener.open(request, timeout=REQUEST_S) as response:
        response.read()
