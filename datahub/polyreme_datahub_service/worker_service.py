"""A worker of data flows as a service of an installation: probes, metrics, and patience with servers that are away."""

from __future__ import annotations

import argparse
import asyncio
import logging
import threading

from polyreme_api.errors import InvalidConfigError, PolyremeError
from polyreme_cluster import metrics_server
from polyreme_cluster.adapters.kubernetes.connection import from_kubeconfig, from_service_account
from polyreme_cluster.arguments import LOOPBACK, address, in_cluster
from polyreme_cluster.logging_setup import LogFormat, set_up
from polyreme_cluster.metrics_server import Reviewer, ReviewError
from polyreme_datahub.hub import work
from polyreme_datahub_service.health import RETRY_MAX_S, RETRY_S, Health
from polyreme_datahub_service.home import DataHome
from polyreme_datahub_service.metrics import DataMetrics
from polyreme_datahub_service.service import StoreChecks
from polyreme_system.clock import SystemClock

_log = logging.getLogger(__name__)


class WorkerService:
    """Works on flows until stopped, whatever is away.

    Args:
        home: Names registry, object store and topics.
        operations: Chains to work on, by their last operations.
        workers: Threads.
        address: ``HOST:PORT`` of metrics and probes.

    Raises:
        InvalidConfigError: If the address is none.
    """

    def __init__(self, home: DataHome, operations: list[str], *, workers: int, address: str) -> None:
        self._home, self._operations, self._workers = home, operations, workers
        self._host, self._port = _parsed(address)
        self._clock, self._metrics = SystemClock(), DataMetrics()
        self.health = Health(StoreChecks(home, needs_topics=True), steady_s=self._clock.steady_s)
        self._metrics.ready.set_function(lambda: float(self.health.ready))

    def run(self, stopped: threading.Event) -> None:
        """Work until stopped."""
        set_up(LogFormat.JSON, level=logging.INFO)
        for name, body in (("checks", self._check), ("probes", self._answer_probes)):
            threading.Thread(target=body, args=(stopped,), name=name, daemon=True).start()
        wait_s = RETRY_S
        while not stopped.is_set():
            self.health.wait_checked()
            if self.health.trouble:
                stopped.wait(RETRY_S)
                continue
            begun_s = self._clock.steady_s()
            try:
                self._work(stopped)
            except PolyremeError as error:
                self.health.note(str(error))
            except Exception as error:  # noqa: BLE001 - it is reported, and the work begins again
                _log.exception("work ended with an error, beginning again")
                self.health.note(f"{type(error).__name__}: {error}")
            # Only failures in a row wait longer.
            wait_s = RETRY_S if self._clock.steady_s() - begun_s > RETRY_MAX_S else min(RETRY_MAX_S, wait_s * 2)
            stopped.wait(wait_s)

    def _work(self, stopped: threading.Event) -> None:
        _log.info("working on %s with %d threads", ", ".join(self._operations), self._workers)
        work(
            self._operations,
            registry_url=self._home.registry_url,
            objects_url=self._home.objects_url,
            topics_url=self._home.topics_url,
            stopped=stopped.is_set,
            on_counts=self._metrics.on_counts,
            on_item=self._metrics.on_item,
            workers=self._workers,
        )

    def _check(self, stopped: threading.Event) -> None:
        self.health.run(stopped)

    def _answer_probes(self, _stopped: threading.Event) -> None:
        asyncio.run(
            metrics_server.serve(
                self._metrics,
                host=self._host,
                port=self._port,
                reviewer=None if self._host in LOOPBACK else self._reviewer(),
                is_ready=lambda: self.health.ready,
                started=lambda port: _log.info("metrics and probes are served", extra={"port": port}),
            )
        )

    def _reviewer(self) -> Reviewer:
        try:
            connection = from_service_account() if in_cluster() else from_kubeconfig()
        except PolyremeError as error:
            return _NoReviewer(str(error))
        return metrics_server.CachedReviewer(metrics_server.AccessReviewer(connection), self._clock)


class _NoReviewer:
    """Refuses everybody: this process has no account that could ask who they are."""

    def __init__(self, why: str) -> None:
        self._why = why

    async def verdict(self, token: str) -> int:
        """Raise ReviewError."""
        del token
        raise ReviewError(f"this worker can't review tokens: {self._why}")


def _parsed(text: str) -> tuple[str, int]:
    try:
        return address(text)
    except argparse.ArgumentTypeError as error:
        raise InvalidConfigError(str(error), field="--metrics-address") from error
