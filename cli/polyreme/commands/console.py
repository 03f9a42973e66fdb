"""``polyreme console``: the runs of this machine in a browser."""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from polyreme.local_run.signals import stop_signals
from polyreme_api.errors import EnvironmentFailedError
from polyreme_system.clock import SystemClock

if TYPE_CHECKING:
    from polyreme.run_files.paths import Home

HOST = "127.0.0.1"
STOP_S = 2.0


def console(
    context: typer.Context,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8265,
) -> None:
    """Look at runs, compare them and start new ones in a browser of this machine, until it is stopped.

    Prints a link that opens a session in one browser, and a new one each time it was used. The server listens on
    127.0.0.1 alone and acts as you do: each action shows the command that does the same.

    Examples:

      polyreme console

      polyreme console --port 0
    """
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    asyncio.run(_serve(context.obj, port))


async def _serve(home: Home, port: int) -> None:
    from aiohttp import web

    from polyreme.console.server import ConsoleServer

    stopped = asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    address = ""

    def show_link() -> None:
        sys.stdout.write(f"http://{address}{server.guard.start_path()}\n")
        sys.stdout.flush()

    server = ConsoleServer(home, SystemClock(), on_started=show_link)
    runner = web.AppRunner(server.application(), access_log=None, shutdown_timeout=STOP_S)
    await runner.setup()
    try:
        try:
            await web.TCPSite(runner, HOST, port).start()
        except OSError as error:
            raise EnvironmentFailedError(
                f"console can't listen on {HOST}:{port}: {error.strerror or error}; choose another", field="--port"
            ) from error
        address = f"{HOST}:{runner.addresses[0][1]}"
        sys.stdout.write(f"console of {home.path}; Ctrl-C stops it. Each link opens one browser:\n")
        show_link()
        await stopped.wait()
    finally:
        await runner.cleanup()
