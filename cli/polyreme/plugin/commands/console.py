"""``kubectl polyreme console``: the jobs of a cluster in a browser, by the user's own kubeconfig."""

from __future__ import annotations

import asyncio
import logging
from typing import Annotated

import typer

from polyreme.plugin.options import Context, Kubeconfig, Namespace, target
from polyreme_system.clock import SystemClock


def console(
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8266,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
    past: Annotated[
        list[str] | None,
        typer.Option(
            help="Checkpoint root of the operator, of a namespace or of one job, for deleted jobs; repeatable."
        ),
    ] = None,
) -> None:
    """Look at jobs, queues and nodes, and submit jobs, in a browser of this machine, until it is stopped.

    Prints a link that opens a session in one browser, and a new one each time it was used. The server listens on
    127.0.0.1 alone, and reads and writes with the credentials of your kubeconfig: it can do what you can.

    Examples:

      kubectl polyreme console

      kubectl polyreme console -n team-a --port 0

      kubectl polyreme console --past s3://bucket/checkpoints
    """
    from polyreme.console.loopback import serve
    from polyreme.plugin.console.backend import KubeconfigBackend

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(name)s %(message)s")
    where = target(kubeconfig, context, namespace)
    title = f"console of {where.connection().url}, namespace {where.in_namespace}"
    asyncio.run(serve(lambda: KubeconfigBackend(where, SystemClock(), past or ()), title, port=port))
