"""The process ``polyreme-datahub``: of several replicas, the one that holds the Lease prepares data."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import socket

from polyreme.data.controller import DataController
from polyreme.data.options import Options
from polyreme.data.preparation import LocalPreparation
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_operator import election
from polyreme_operator.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_operator.adapters.kubernetes.connection import Connection, from_kubeconfig, from_service_account
from polyreme_operator.arguments import in_cluster
from polyreme_operator.logging_setup import set_up
from polyreme_operator.port import ClusterPort
from polyreme_system.clock import SystemClock

LEASE_NAME = "polyreme-datahub"

_log = logging.getLogger(__name__)


def run_service(options: Options) -> int:
    """Prepare data until SIGTERM or SIGINT; return the exit code."""
    set_up(options.log_format, level=options.log_level)
    try:
        options.home.prepare_data()
        asyncio.run(_until_told(options, from_service_account() if in_cluster() else from_kubeconfig()))
    except PolyremeError as error:
        _log.error("%s", error)
        return int(error.exit_code)
    return int(ExitCode.OK)


async def _until_told(options: Options, connection: Connection) -> None:
    work = asyncio.ensure_future(_connected(options, connection))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _connected(options: Options, connection: Connection) -> None:
    async with KubernetesCluster(connection) as cluster:
        await serve(cluster, options)


async def serve(cluster: ClusterPort, options: Options) -> None:
    """Contend for the Lease, and prepare data while this replica holds it, until cancelled."""
    clock = SystemClock()

    async def run() -> None:
        controller = DataController(
            cluster,
            LocalPreparation(options.home),
            clock,
            namespace=options.jobs_namespace,
            jobs_max=options.jobs_max,
        )
        await controller.run()

    await election.lead(
        cluster,
        clock,
        identity=f"{socket.gethostname()}_{secrets.token_hex(4)}",
        namespace=options.namespace,
        rng=random.Random(),
        run=run,
        name=LEASE_NAME,
    )
