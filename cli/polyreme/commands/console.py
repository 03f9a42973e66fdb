"""``polyreme console``: the runs of this machine in a browser."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from polyreme_system.clock import SystemClock


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
    from polyreme.console.home.backend import HomeBackend
    from polyreme.console.loopback import serve

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    home = context.obj
    asyncio.run(serve(lambda: HomeBackend(home, SystemClock()), f"console of {home.path}", port=port))
