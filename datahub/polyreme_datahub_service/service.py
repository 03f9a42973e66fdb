"""The process ``polyreme-datahub``: of several replicas, the one that holds the Lease prepares data.

A server that is wrong or away ends nothing: the process stays, is not ready, and every job that waits says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import secrets
import signal
import socket
import threading
from collections.abc import AsyncIterator

from polyreme_api.environment import TOPICS_URL
from polyreme_api.errors import InvalidConfigError, PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster import election, metrics_server
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig, from_service_account
from polyreme_cluster.arguments import LOOPBACK, in_cluster
from polyreme_cluster.leader_port import LeaderPort
from polyreme_cluster.logging_setup import set_up
from polyreme_cluster.port import ClusterPort, ObjectRef, PortError
from polyreme_datahub.probe import Probe
from polyreme_datahub.runner.pool_sizes import PoolLimits
from polyreme_datahub_service.controller import DataController
from polyreme_datahub_service.health import GuardedPreparation, Health
from polyreme_datahub_service.home import DataHome
from polyreme_datahub_service.metrics import DataMetrics
from polyreme_datahub_service.options import Options
from polyreme_datahub_service.preparation import LocalPreparation
from polyreme_datahub_service.work_watch import PoolScaler, WorkerPools, WorkWatch
from polyreme_system.clock import SystemClock

LEASE_NAME = "polyreme-datahub"
LEASE_RETRY_S = 1.0

_log = logging.getLogger(__name__)


def run_service(options: Options) -> int:
    """Prepare data until SIGTERM or SIGINT; return the exit code."""
    set_up(options.log_format, level=options.log_level)
    try:
        asyncio.run(_until_stopped(options, from_service_account() if in_cluster() else from_kubeconfig()))
    except PolyremeError as error:
        _log.error("%s", error)
        return int(error.exit_code)
    return int(ExitCode.OK)


async def _until_stopped(options: Options, connection: Connection) -> None:
    work = asyncio.ensure_future(_connected(options, connection))
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, work.cancel)
    with contextlib.suppress(asyncio.CancelledError):
        await work


async def _connected(options: Options, connection: Connection) -> None:
    service = DataService(options)
    async with KubernetesCluster(connection) as cluster, asyncio.TaskGroup() as tasks:
        tasks.create_task(service.answer_probes(connection), name="probes")
        await service.run(cluster)


class StoreChecks(Probe):
    """The servers of a home, and its folders.

    Args:
        home: Names the servers.
        needs_topics: Whether topics must be named, since other processes work.
    """

    def __init__(self, home: DataHome, *, needs_topics: bool) -> None:
        super().__init__(
            registry_url=home.registry_url,
            objects_url=home.objects_url,
            topics_url=home.topics_url,
            now_s=SystemClock().now_s,
        )
        self._home, self._needs_topics = home, needs_topics

    def check(self) -> None:
        """Ask each server, after the folders are made; raises the first error."""
        if self._needs_topics and not self._home.topics_url:
            raise InvalidConfigError("workers need topics that processes share, and none are named", field=TOPICS_URL)
        self._home.prepare_data()
        super().check()


class DataService:
    """The controller of one process, with what it shows of itself.

    Args:
        options: How the command was called.
    """

    def __init__(self, options: Options) -> None:
        self._options, self._clock = options, SystemClock()
        self._metrics, self._checks = DataMetrics(), StoreChecks(options.home, needs_topics=options.workers is not None)
        self._controller: DataController | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.health = Health(self._checks, steady_s=self._clock.steady_s, on_recovered=self._recovered)
        self._metrics.ready.set_function(lambda: float(self.health.ready))

    async def answer_probes(self, connection: Connection) -> None:
        """Serve metrics and probes, until cancelled."""
        options = self._options
        reviewer = metrics_server.CachedReviewer(metrics_server.AccessReviewer(connection), self._clock)
        await metrics_server.serve(
            self._metrics,
            host=options.host,
            port=options.port,
            reviewer=None if options.host in LOOPBACK else reviewer,
            is_ready=lambda: self.health.ready,
            started=lambda port: _log.info("metrics and probes are served", extra={"port": port}),
        )

    async def run(self, cluster: ClusterPort) -> None:
        """Contend for the Lease, and prepare data while this replica holds it, until cancelled."""
        self._loop = asyncio.get_running_loop()
        async with self._checking():
            await election.lead(
                cluster,
                self._clock,
                identity=f"{socket.gethostname()}_{secrets.token_hex(4)}",
                namespace=self._options.namespace,
                rng=random.Random(),
                run=lambda leads: self._lead(LeaderPort(cluster, leads)),
                name=LEASE_NAME,
            )

    async def _lead(self, cluster: ClusterPort) -> None:
        options = self._options
        scaler = self._scaler(cluster)
        preparation = GuardedPreparation(
            LocalPreparation(options.home, only_seals=scaler is not None, scope=await self._scope(cluster)),
            self.health,
            held_up=lambda: "" if scaler is None else scaler.trouble,
        )
        controller = DataController(
            cluster, preparation, self._clock, namespace=options.jobs_namespace, jobs_max=options.jobs_max
        )
        watch = WorkWatch(self._checks, self._metrics, self._clock, jobs=controller.jobs_by_state, scaler=scaler)
        self._controller = controller
        self._metrics.leader.set(1)
        try:
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(controller.run(), name="controller")
                tasks.create_task(watch.run(), name="work")
        finally:
            self._controller = None
            self._metrics.clear_gauges()

    async def _scope(self, cluster: ClusterPort) -> str:
        """Name the jobs of this installation: others may have theirs in the same registry."""
        ref = ObjectRef(kind="Lease", namespace=self._options.namespace, name=LEASE_NAME)
        while True:
            try:
                lease = await cluster.get(ref)
                return f"{lease['metadata']['uid']}/{self._options.jobs_namespace or '*'}"
            except PortError as error:
                _log.info("can't read the Lease, retrying: %s", error)
                await self._clock.sleep(LEASE_RETRY_S)

    def _scaler(self, cluster: ClusterPort) -> PoolScaler | None:
        """Return what sizes the Deployments of workers, if there are any."""
        named = self._options.workers
        if named is None:
            return None
        limits = {"cpu": PoolLimits(most=named.most, threads=named.threads)}
        if named.gpu_most:
            limits["gpu"] = PoolLimits(most=named.gpu_most, threads=named.threads)
        pools = WorkerPools(
            deployment=named.deployment,
            namespace=self._options.namespace,
            operations=frozenset(named.operations),
            limits=limits,
        )
        return PoolScaler(cluster, pools, self._metrics)

    @contextlib.asynccontextmanager
    async def _checking(self) -> AsyncIterator[None]:
        """Check the servers in a thread."""
        stopped = threading.Event()
        thread = threading.Thread(target=self.health.run, args=(stopped,), name="checks", daemon=True)
        thread.start()
        try:
            yield
        finally:
            # A check that waits for a server must not hold up the end: the thread ends with the process.
            stopped.set()

    def _recovered(self) -> None:
        """Let jobs that failed try again; called by the checking thread."""
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._retry)

    def _retry(self) -> None:
        if self._controller is not None:
            self._controller.retry_now()
