"""A console on loopback for the user of this machine, until it is stopped."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable

from aiohttp import web

from polyreme.console.context import Backend
from polyreme.console.guard import LinkGuard
from polyreme.console.server import ConsoleServer
from polyreme.local_run.signals import stop_signals
from polyreme_api.errors import EnvironmentFailedError

HOST = "127.0.0.1"
STOP_S = 2.0


async def serve(make: Callable[[], Backend], title: str, *, port: int) -> None:
    """Serve until a signal comes, and print the links that open sessions.

    Args:
        make: Returns whose runs are shown; it is called in the loop.
        title: What the console is of.
        port: 0 takes a free one.

    Raises:
        EnvironmentFailedError: If the port is taken.
    """
    stopped = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = ""

    def show_link() -> None:
        sys.stdout.write(f"http://{address}{guard.start_path()}\n")
        sys.stdout.flush()

    guard = LinkGuard(show_link)
    runner = web.AppRunner(ConsoleServer(make(), guard).application(), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        await listen(runner, HOST, port)
        address = f"{HOST}:{runner.addresses[0][1]}"
        sys.stdout.write(f"{title}; Ctrl-C stops it. Each link opens one browser:\n")
        show_link()
        await stopped.wait()
    finally:
        await runner.cleanup()


async def listen(runner: web.AppRunner, host: str, port: int) -> None:
    """Listen on an address.

    Raises:
        EnvironmentFailedError: If that can't be.
    """
    try:
        await web.TCPSite(runner, host, port).start()
    except OSError as error:
        raise EnvironmentFailedError(
            f"console can't listen on {host}:{port}: {error.strerror or error}; choose another", field="--port"
        ) from error
