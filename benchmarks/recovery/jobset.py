"""JobSet's own manager beside an API server, without its webhooks, and a gang of its pods."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import aiohttp
from benchmarks.shared.api_server import Server, install

from polyreme_api import labels
from polyreme_cluster.port import Manifest
from tools.cluster.servers import free_ports, http_status

MODULE = "sigs.k8s.io/jobset@v0.11.1"
CRD = "config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml"
PATH = "/apis/jobset.x-k8s.io/v1alpha2/namespaces/default/jobsets"
READY_S = 60.0
SETTLE_S = 3.0
OK = 200
RESTARTS = 100


@contextlib.asynccontextmanager
async def running(server: Server, program: Path) -> AsyncIterator[None]:
    """Install JobSet's kind and run its manager, unmodified, with as many requests a second as it likes."""
    _install(server)
    health, webhook = free_ports(2)
    certificates = server.folder / "jobset-certificates"
    certificates.mkdir()
    keys = server.folder / "cluster/keys"
    for name, source in (("tls.crt", "server.crt"), ("tls.key", "server.key")):
        (certificates / name).write_bytes((keys / source).read_bytes())
    configuration = server.folder / "jobset.json"
    configuration.write_text(
        json.dumps(
            {
                "apiVersion": "config.jobset.x-k8s.io/v1alpha1",
                "kind": "Configuration",
                "leaderElection": {"leaderElect": False},
                "internalCertManagement": {"enable": False},
                "health": {"healthProbeBindAddress": f"127.0.0.1:{health}"},
                "metrics": {"bindAddress": "0"},
                "webhook": {"port": webhook, "host": "127.0.0.1", "certDir": str(certificates)},
                "clientConnection": {"qps": 1000, "burst": 2000},
            }
        )
    )
    path = server.folder / "jobset.log"
    with path.open("wb") as log:
        process = await asyncio.create_subprocess_exec(
            str(program),
            f"--config={configuration}",
            env={**os.environ, "KUBECONFIG": server.kubeconfig},
            stdout=log,
            stderr=log,
        )
    try:
        async with asyncio.timeout(READY_S):
            while True:
                if http_status(health, "/readyz") == OK:
                    break
                await asyncio.sleep(0.2)
        await asyncio.sleep(SETTLE_S)
        yield
    except BaseException:
        print(path.read_text(errors="replace")[-3000:], file=sys.stderr)
        raise
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.terminate()
        await process.wait()


async def create(session: aiohttp.ClientSession, name: str, pods: int) -> None:
    """Create a gang: one Job of so many pods, which fails with its first pod and is then recreated."""
    async with session.post(PATH, data=json.dumps(_jobset(name, pods)), headers=_JSON) as response:
        if not response.ok:
            raise RuntimeError(f"JobSet {name} was refused: {(await response.text())[:1000]}")


async def delete(session: aiohttp.ClientSession, name: str) -> None:
    """Delete a gang; its pods go with it."""
    async with session.delete(f"{PATH}/{name}?propagationPolicy=Background") as response:
        response.raise_for_status()


_JSON = {"Content-Type": "application/json"}


def _install(server: Server) -> None:
    module = json.loads(
        subprocess.run(["go", "mod", "download", "-json", MODULE], check=True, capture_output=True).stdout
    )
    install(server.kubeconfig, [Path(module["Dir"]) / CRD])


def _jobset(name: str, pods: int) -> Manifest:
    # What the defaulting webhook would fill in is written out.
    amounts = {labels.RESOURCE_DEVICE: "1"}
    container = {
        "name": "main",
        "image": "registry.example/none:1",
        "resources": {"requests": amounts, "limits": amounts},
    }
    job = {
        "parallelism": pods,
        "completions": pods,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "podReplacementPolicy": "TerminatingOrFailed",
        "template": {"spec": {"restartPolicy": "Never", "subdomain": name, "containers": [container]}},
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": name, "namespace": "default"},
        "spec": {
            "failurePolicy": {"maxRestarts": RESTARTS, "restartStrategy": "Recreate"},
            "successPolicy": {"operator": "All", "targetReplicatedJobs": []},
            "startupPolicy": {"startupPolicyOrder": "AnyOrder"},
            "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": name},
            "replicatedJobs": [{"name": "w", "replicas": 1, "groupName": "default", "template": {"spec": job}}],
        },
    }
