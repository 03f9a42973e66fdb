"""The operator process: kopf logs in, watches our own kinds and handles signals; one replica leads."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import itertools
import logging
import random
import secrets
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import aiohttp
import kopf

from polyreme_api import labels
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster import election, metrics_server
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig, from_service_account
from polyreme_cluster.arguments import in_cluster
from polyreme_cluster.instrumented_client import InstrumentedCluster
from polyreme_cluster.leader_port import LeaderPort
from polyreme_cluster.logging_setup import set_up
from polyreme_cluster.port import PAGE_OBJECTS, ClusterPort
from polyreme_operator.cache.kinds import watched_kinds
from polyreme_operator.controller import run_operator
from polyreme_operator.kopf_feed import KopfFeed, own_kinds, wait_until_served
from polyreme_operator.options import Options
from polyreme_operator.plan_worker import ProcessPlanner
from polyreme_operator.publishing.alerts import AlertQueue
from polyreme_operator.publishing.metrics import Metrics
from polyreme_operator.types.observer import Observer, Observers
from polyreme_operator.webhook import Webhook
from polyreme_system.clock import SystemClock

WORKERS_MAX = 64
"""Objects whose events kopf handles concurrently; without a bound, 15,000 initial objects held as many connections."""
WORKER_IDLE_S = 0.05
"""Idle timeout of a kopf worker; with the default of 5 s the bound would make it very slow."""
RETRIES_S = (1.0, 1.0, 2.0, 3.0, 5.0)
"""Retry delays of kopf's requests; the last one repeats. With its defaults kopf would give up after 54 s."""
EXIT_S = 25.0
"""Longest shutdown; a pod's own grace period is 30 s."""

_log = logging.getLogger(__name__)


def run_service(options: Options) -> int:
    """Run until SIGTERM or SIGINT; return the exit code."""
    set_up(options.log_format, level=options.log_level)
    logging.getLogger("kopf").setLevel(max(options.log_level, logging.WARNING))
    try:
        connection = from_service_account() if in_cluster() else from_kubeconfig()
        asyncio.run(serve(options, connection))
    except PolyremeError as error:
        _log.error("%s", error)
        return int(error.exit_code)
    return ExitCode.OK


async def serve(options: Options, connection: Connection) -> None:
    """Contend for the Lease, and run the operator while this replica holds it."""
    metrics, clock = Metrics(), SystemClock()
    if options.webhook_secret is not None:
        Webhook(folder=options.webhook_secret, runbook_url=options.runbook_url).read_url()
    async with KubernetesCluster(connection, selectors={"Lease": labels.LABEL_JOB_UID}) as cluster:
        shell = _Shell(options, connection, InstrumentedCluster(cluster, metrics), metrics, clock)
        probes = asyncio.ensure_future(shell.answer_probes())
        try:
            await shell.run()
        finally:
            probes.cancel()
            await asyncio.wait({probes})


class _Shell:
    def __init__(
        self,
        options: Options,
        connection: Connection,
        port: InstrumentedCluster,
        metrics: Metrics,
        clock: SystemClock,
    ) -> None:
        self._options, self._connection, self._port = options, connection, port
        self._metrics, self._clock = metrics, clock
        self._kinds = own_kinds(watched_kinds(health=options.settings.node_health))
        self._feed = KopfFeed(port, self._kinds, clock, only={"ConfigMap": options.settings.namespace})
        self._stop = asyncio.Event()
        self._work: asyncio.Future[None] | None = None

    async def run(self) -> None:
        """Run until a signal comes or the work fails.

        Raises:
            Exception: The error of the work.
        """
        await wait_until_served(self._port, self._kinds, self._clock)
        registry = kopf.OperatorRegistry()
        self._feed.register(registry)
        kopf.on.login(registry=registry)(_login)
        kopf.on.startup(registry=registry)(self._start)
        kopf.on.cleanup(registry=registry)(self._end)
        settings = _settings()
        await kopf.operator(
            registry=registry, settings=settings, standalone=True, clusterwide=True, stop_flag=self._stop
        )
        if self._work is not None and not self._work.cancelled():
            self._work.result()

    async def answer_probes(self) -> None:
        """Serve metrics and probes."""
        options = self._options
        reviewer = metrics_server.AccessReviewer(self._connection)
        await metrics_server.serve(
            self._metrics,
            host=options.host,
            port=options.port,
            reviewer=None if options.is_local else metrics_server.CachedReviewer(reviewer, self._clock),
            is_ready=lambda: self._work is not None and not self._work.done(),
            is_alive=lambda: self._work is None or not self._work.done(),
            started=lambda port: _log.info("metrics and probes are served", extra={"port": port}),
        )

    async def _start(self, **_: Any) -> None:
        identity = f"{socket.gethostname()}_{secrets.token_hex(4)}"
        self._work = asyncio.ensure_future(
            election.lead(
                self._port,
                self._clock,
                identity=identity,
                namespace=self._options.settings.namespace,
                rng=random.Random(),
                run=self._lead,
            )
        )
        self._work.add_done_callback(lambda _: self._stop.set())

    async def _end(self, **_: Any) -> None:
        """Stop the work and release the Lease before the connections are closed."""
        if self._work is not None:
            self._work.cancel()
            await asyncio.wait({self._work}, timeout=EXIT_S)

    async def _lead(self, leads: Callable[[], bool]) -> None:
        planner = ProcessPlanner()
        try:
            with self._metrics.leading():
                await self._run(planner, LeaderPort(self._feed, leads))
        finally:
            planner.close()

    async def _run(self, planner: ProcessPlanner, cluster: ClusterPort) -> None:
        async with alerting(self._options, self._metrics, self._clock) as observer:
            await run_operator(
                cluster,
                self._clock,
                settings=self._options.settings,
                rng=random.Random(),
                entropy=secrets.token_bytes,
                observer=observer,
                planner=planner,
            )


@contextlib.asynccontextmanager
async def alerting(options: Options, metrics: Metrics, clock: SystemClock) -> AsyncIterator[Observer]:
    """While this lasts, deliver alerts if there is a webhook; what is yielded takes the operator's reports."""
    if options.webhook_secret is None:
        yield metrics
        return
    webhook = Webhook(folder=options.webhook_secret, runbook_url=options.runbook_url)
    async with aiohttp.ClientSession(trust_env=True) as session:
        alerts = AlertQueue(clock, functools.partial(webhook.deliver, session), metrics.on_alert)
        delivery = asyncio.ensure_future(alerts.run())
        try:
            yield Observers(metrics, alerts)
        finally:
            delivery.cancel()
            await asyncio.wait({delivery})


def _settings() -> kopf.OperatorSettings:
    settings = kopf.OperatorSettings()
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.queueing.worker_limit = WORKERS_MAX
    settings.queueing.idle_timeout = WORKER_IDLE_S
    settings.watching.chunk_size = PAGE_OBJECTS
    settings.process.ultimate_exiting_timeout = EXIT_S
    settings.networking.error_backoffs = _Retries()
    return settings


class _Retries(Iterable[float]):
    def __iter__(self) -> Iterator[float]:
        return itertools.chain(RETRIES_S, itertools.repeat(RETRIES_S[-1]))


def _login(**arguments: Any) -> kopf.ConnectionInfo | None:
    """Log in with the adapter's credentials."""
    if in_cluster():
        return kopf.login_with_service_account(**arguments)
    return kopf.login_via_client(**arguments)
