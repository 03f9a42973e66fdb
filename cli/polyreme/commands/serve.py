"""``polyreme serve``: a trained model that answers over HTTP."""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from polyreme.commands.asked_model import TARGET_HELP, WEIGHTS_HELP, AskedModel, open_asked
from polyreme.local_run.signals import stop_signals
from polyreme.serving.access import Access, check_address, read_token
from polyreme.serving.places import ServerLimits
from polyreme_api.environment import SERVE_TOKEN
from polyreme_api.errors import EnvironmentFailedError
from polyreme_datahub.sandbox.tasks import Limits
from polyreme_planner.int4_weights import WeightsKind
from polyreme_planner.latent_cache import CacheKind
from polyreme_system.addresses import listen
from polyreme_system.clock import SystemClock

if TYPE_CHECKING:
    from polyreme_trainer.serve.engine import Engine

CONTEXT_TOKENS = 16_384
"""Longest sequence unless --context says another: the cache has room for one at least."""
MIB = 1 << 20
DECODING = Limits(wall_s=30.0, cpu_s=15)
"""What the images of a request may take: others wait meanwhile."""
KEEP_ALIVE_S = 75.0
"""How long a connection without a request stays open."""
STOP_S = 30.0
"""How long answers that have begun may take when the server stops."""


def serve(
    context: typer.Context,
    target: Annotated[str, typer.Argument(metavar="RUN", help=TARGET_HELP)],
    checkpoint: Annotated[str | None, typer.Option(help="Name of the checkpoint.", show_default="the newest")] = None,
    host: Annotated[str, typer.Option(help="Address to listen on; beyond loopback a token is needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    token_file: Annotated[
        Path | None, typer.Option(help="File with the token that clients must bring.", show_default=f"${SERVE_TOKEN}")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model.", show_default="that of the run")] = None,
    rows: Annotated[int, typer.Option(min=1, max=1024, help="Answers that run at once.")] = 16,
    queue: Annotated[int, typer.Option(min=0, max=10_000, help="Requests that may wait for them.")] = 32,
    tokens: Annotated[
        int | None,
        typer.Option("--context", min=2, help="Longest prompt with its answer in tokens.", show_default="its own"),
    ] = None,
    timeout: Annotated[float, typer.Option(min=0.1, help="Longest time of a request in seconds.")] = 120.0,
    body: Annotated[int, typer.Option("--body-mib", min=1, max=1024, help="Largest request in MiB.")] = 20,
    cache: Annotated[CacheKind, typer.Option(help="Type of the latents in the cache.")] = CacheKind.AUTO,
    cache_mib: Annotated[int, typer.Option(min=1, help="Most memory of the cache in MiB.")] = 1024,
    device: Annotated[str | None, typer.Option(help="cpu or cuda.", show_default="cuda if there is one")] = None,
    weights: Annotated[WeightsKind, typer.Option(case_sensitive=False, help=WEIGHTS_HELP)] = WeightsKind.AUTO,
) -> None:
    """Serve a trained model over HTTP, in the form of OpenAI's chat completions, until it is stopped.

    Images are parts of a message as data: URLs; nothing is fetched. The weights are in memory: a checkpoint that is
    deleted meanwhile is not missed. For many users, serve an export by vLLM.

    Examples:

      polyreme serve quickstart

      polyreme serve ./model --host 0.0.0.0 --token-file token
    """
    token = read_token(token_file, os.environ.get(SERVE_TOKEN), name=SERVE_TOKEN)
    check_address(host, token, name=SERVE_TOKEN)
    _check_free(host, port)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    opened = open_asked(context.obj, target, checkpoint, device=device, weights=weights)
    longest = min(opened.rules.tokens_max, CONTEXT_TOKENS) if tokens is None else tokens
    limits = ServerLimits(requests=rows + queue, body_bytes=body * MIB, request_s=timeout, tokens=longest)
    make = functools.partial(
        opened.engine, tokens_max=longest, rows_max=rows, cache=cache, cache_bytes_max=cache_mib * MIB
    )
    opened = dataclasses.replace(
        opened, name=name or opened.name, rules=dataclasses.replace(opened.rules, tokens_max=longest)
    )
    asyncio.run(_serve(opened, make, limits, Access(token), host, port))


def _check_free(host: str, port: int) -> None:
    """Refuse an address that is not available, before weights are read.

    Raises:
        EnvironmentFailedError: If it is not.
    """
    try:
        listen(host, port, backlog=1).close()
    except OSError as error:
        raise _not_available(host, port, error) from error


def _not_available(host: str, port: int, error: OSError) -> EnvironmentFailedError:
    return EnvironmentFailedError(
        f"server can't listen on {host}:{port}: {error.strerror or error}; choose another", field="--host or --port"
    )


async def _serve(
    opened: AskedModel, make: Callable[[], Engine], limits: ServerLimits, access: Access, host: str, port: int
) -> None:
    """Answer requests until a signal comes, and those that have begun to their end."""
    from aiohttp import web

    from polyreme.serving.engine_thread import EngineThread
    from polyreme.serving.server import AnswerServer

    clock, stopped = SystemClock(), asyncio.Event()
    for number in stop_signals():
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    engine = EngineThread(make, clock)
    engine.start()
    server = AnswerServer(opened.name, opened.reader(DECODING), engine, access=access, limits=limits, clock=clock)
    runner = web.AppRunner(
        server.application(),
        access_log=None,
        handler_cancellation=True,
        keepalive_timeout=KEEP_ALIVE_S,
        shutdown_timeout=STOP_S,
    )
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        try:
            await site.start()
        except OSError as error:
            raise _not_available(host, port, error) from error
        address = f"[{host}]" if ":" in host else host
        sys.stdout.write(f"serving {opened.name} at http://{address}:{runner.addresses[0][1]}/v1; Ctrl-C stops\n")
        sys.stdout.flush()
        await stopped.wait()
    finally:
        await runner.cleanup()
        engine.stop()
        server.close()
