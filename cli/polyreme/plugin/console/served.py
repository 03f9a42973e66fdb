"""A console in a cluster, for all of its users: it has no account, and each call is made with the user's own token.

``python -m polyreme.plugin.console``
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import logging
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path

from aiohttp import web

from polyreme.console import pages
from polyreme.console.commands import Commands
from polyreme.console.guard import RefusedRequestError
from polyreme.console.loopback import listen
from polyreme.console.server import ConsoleServer
from polyreme.console.token_guard import ConsoleAddress, Login, TokenGuard
from polyreme.local_run.signals import stop_signals
from polyreme.plugin.console import pages as cluster_pages
from polyreme.plugin.console.backend import REQUEST_S, SELECTORS
from polyreme.plugin.console.source import ClusterSource, away
from polyreme.plugin.identity import REVIEW
from polyreme_api.clock import Clock
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_pod_environment
from polyreme_cluster.arguments import Arguments, address, level
from polyreme_cluster.logging_setup import LogFormat, set_up
from polyreme_cluster.port import ClusterPort, PortError, UnauthorizedError
from polyreme_system.clock import SystemClock

PREFIX = "POLYREME_CONSOLE_"
AUTHORITY = "/var/run/polyreme/cluster/ca.crt"
REVIEWS_MAX = 8
"""Tokens that the API server is asked about at once."""
REVIEWS_WAITING_MAX = 64
"""Tokens that wait for that or are asked about; more are refused, so that strangers fill no memory."""
STOP_S = 2.0
ENDED = "the cluster does not accept your token any more (401): it has expired or was withdrawn; log in again"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class UserReach:
    """The cluster as the user of one request reaches it."""

    cluster: ClusterPort
    connection: Connection
    unauthorized: tuple[int, str] = (401, ENDED)


class ServedBackend:
    """The jobs of the cluster, for each request with the token that it brings.

    Args:
        own: The console's address, and where requests hold the user's token.
        connection: The API server, without an account.
        commands: Checks jobs.
        clock: Of this machine.
        namespace: Where a user looks who names no other.
    """

    pages = (pages, cluster_pages)

    def __init__(
        self, own: ConsoleAddress, connection: Connection, commands: Commands, clock: Clock, *, namespace: str
    ) -> None:
        self._own, self._connection, self._commands = own, connection, commands
        self._clock, self._namespace = clock, namespace
        self._cluster = KubernetesCluster(connection, request_s=REQUEST_S, selectors=SELECTORS)
        self._reviews, self._reviewing = asyncio.Semaphore(REVIEWS_MAX), 0

    def source(self, request: web.Request) -> ClusterSource:
        """Return the jobs as the user sees them whose token the request brings."""
        return ClusterSource(self._as(self._own.token(request)), self._commands, self._clock, namespace=self._namespace)

    async def review(self, token: str) -> str:
        """Ask the API server whose token this is: it answers that to each user, and the console needs no right for it.

        Raises:
            RefusedRequestError: If it accepts no such token or does not answer, or too many wait.
        """
        if self._reviewing >= REVIEWS_WAITING_MAX:
            raise RefusedRequestError(
                503, f"{self._reviewing} tokens wait to be checked; this page looks again by itself"
            )
        self._reviewing += 1
        try:
            async with self._reviews:
                answer = await self._as(token).cluster.create(dict(REVIEW))
        except UnauthorizedError as error:
            raise RefusedRequestError(401, ENDED) from error
        except PortError as error:
            raise away(error) from error
        finally:
            self._reviewing -= 1
        return str(((answer.get("status") or {}).get("userInfo") or {}).get("username") or "")

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Hold the connections open."""
        async with self._cluster:
            yield

    def _as(self, token: str) -> UserReach:
        connection = self._connection.with_token(token)
        return UserReach(cluster=self._cluster.acting_as(connection), connection=connection)


def served_console(
    connection: Connection, folder: Path, clock: Clock, *, url: str, login: Login, namespace: str
) -> ConsoleServer:
    """Return a console for all users of a cluster.

    Args:
        connection: The API server, without an account.
        folder: Where checks of jobs may write.
        clock: Of this machine.
        url: Address of the console in browsers.
        login: How users show who they are.
        namespace: Where a user looks who names no other.

    Raises:
        InvalidConfigError: If the address is none.
    """
    own = ConsoleAddress(url, login)
    backend = ServedBackend(own, connection, Commands(folder, clock), clock, namespace=namespace)
    return ConsoleServer(backend, TokenGuard(own, review=backend.review, clock=clock))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the console until a signal comes, and return its exit code."""
    given = _parse(sys.argv[1:] if arguments is None else arguments, os.environ)
    set_up(LogFormat(given.log_format), level=level(given.log_level))
    try:
        with tempfile.TemporaryDirectory(prefix="polyreme-console-") as folder:
            asyncio.run(_serve(given, Path(folder)))
    except PolyremeError as error:
        logging.getLogger(__name__).critical("%s", error)
        return error.exit_code
    return ExitCode.OK


async def _serve(given: argparse.Namespace, folder: Path) -> None:
    connection = from_pod_environment(given.authority, os.environ)
    server = served_console(
        connection, folder, SystemClock(), url=given.url, login=Login(given.login), namespace=given.namespace
    )
    stopped = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await listen(runner, *given.listen)
        logging.getLogger(__name__).info("console of %s answers at %s", connection.url, given.url)
        await stopped.wait()
    finally:
        await runner.cleanup()


def _parse(arguments: Sequence[str], environment: Mapping[str, str]) -> argparse.Namespace:
    made = Arguments(
        "python -m polyreme.plugin.console",
        "Serve a console to all users of this cluster. It has no account: each call is made with the user's own token.",
        prefix=PREFIX,
        environment=environment,
    )
    add = made.parser.add_argument
    url = made.given("URL", "")
    add("--url", default=url, required=not url, help="address of the console in browsers, such as https://p.example")
    add("--login", choices=[*Login], default=made.given("LOGIN", Login.FORM), help="a form, or a proxy in front")
    add("--listen", type=address, metavar="HOST:PORT", default=made.given("LISTEN", "127.0.0.1:8080"))
    add("--authority", type=Path, default=made.given("AUTHORITY", AUTHORITY), help="certificate of the API server's CA")
    made.parser.add_argument(
        "--namespace", default=made.given("NAMESPACE", "default"), help="namespace that is shown first"
    )
    made.add_logging()
    return made.parser.parse_args(list(arguments))
