"""Offers devices on nodes that have none, for development clusters: ``python -m polyreme_operator.device_advertiser``.

A device is a number in a node's capacity, as with any extended resource that is advertised by hand: the kubelet keeps
it, and the scheduler counts what pods hold of it. Nodes that offer the resource already are left alone.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence

from polyreme_api import labels
from polyreme_api.clock import Clock
from polyreme_api.errors import PolyremeError
from polyreme_api.exit_codes import ExitCode
from polyreme_cluster.adapters.kubernetes.cluster import KubernetesCluster
from polyreme_cluster.adapters.kubernetes.connection import Connection, from_kubeconfig, from_service_account
from polyreme_cluster.arguments import Arguments, in_cluster, level
from polyreme_cluster.logging_setup import LogFormat, set_up
from polyreme_cluster.port import ClusterPort, ConflictError, Manifest, NotFoundError, ObjectRef, PortError, pages_of
from polyreme_system.clock import SystemClock

VARIABLE_PREFIX = "POLYREME_DEVICES_"
RESOURCE = f"{labels.GROUP}/device"
EVERY_S = 10.0
"""Time between two looks at the nodes: a new node offers its devices this late."""
PER_NODE_MAX = 64

_log = logging.getLogger(__name__)


def main(arguments: Sequence[str] | None = None) -> int:
    """Offer devices until SIGTERM or SIGINT; return the exit code."""
    given = _parser(os.environ).parse_args(arguments)
    set_up(LogFormat(given.log_format), level=level(given.log_level))
    try:
        connection = from_service_account() if in_cluster() else from_kubeconfig()
        asyncio.run(_until_stopped(connection, given.resource, given.per_node))
    except PolyremeError as error:
        _log.error("%s", error)
        return int(error.exit_code)
    return int(ExitCode.OK)


async def advertise(cluster: ClusterPort, clock: Clock, *, resource: str, per_node: int) -> None:
    """Offer devices on every node without any, now and on nodes that come, until cancelled."""
    while True:
        try:
            await offer(cluster, resource=resource, per_node=per_node)
        except PortError as error:
            _log.warning("nodes are looked at again in %g s: %s", EVERY_S, error)
        await clock.sleep(EVERY_S)


async def offer(cluster: ClusterPort, *, resource: str, per_node: int) -> list[str]:
    """Offer devices on the nodes that have none now; return the nodes' names.

    Raises:
        PortError: If the cluster does not answer, or refuses.
    """
    offered: list[str] = []
    amounts = {resource: str(per_node)}
    async for node in _nodes(cluster):
        if _has(node, resource):
            continue
        ref = ObjectRef.of(node)
        # A node that has changed or gone meanwhile is looked at again in the next round.
        with contextlib.suppress(ConflictError, NotFoundError):
            await cluster.patch(
                ref,
                {"status": {"capacity": amounts, "allocatable": amounts}},
                resource_version=node["metadata"]["resourceVersion"],
                subresource="status",
            )
            offered.append(ref.name)
            _log.info("node %s offers %s of %s", ref.name, per_node, resource)
    return offered


async def _nodes(cluster: ClusterPort) -> AsyncIterator[Manifest]:
    async for page in pages_of(cluster, "Node"):
        for node in page.items:
            yield node


def _has(node: Manifest, resource: str) -> bool:
    """Tell whether a node offers any; 0 is what a kubelet makes of an offer when its machine was replaced."""
    capacity = (node.get("status") or {}).get("capacity") or {}
    return str(capacity.get(resource, "0")) != "0"


async def _until_stopped(connection: Connection, resource: str, per_node: int) -> None:
    async with KubernetesCluster(connection) as cluster:
        work = asyncio.ensure_future(advertise(cluster, SystemClock(), resource=resource, per_node=per_node))
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, work.cancel)
        with contextlib.suppress(asyncio.CancelledError):
            await work


def _parser(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    arguments = Arguments(
        "polyreme_operator.device_advertiser",
        "Offer devices on the nodes of a development cluster that have none. They are not real: pods that hold one "
        "run on the node's CPU.",
        prefix=VARIABLE_PREFIX,
        environment=environment,
    )
    arguments.parser.add_argument(
        "--per-node",
        metavar="COUNT",
        type=_count,
        default=arguments.given("PER_NODE", "4"),
        help=f"devices of each node, 1 to {PER_NODE_MAX}",
    )
    arguments.parser.add_argument(
        "--resource", default=arguments.given("RESOURCE", RESOURCE), help=f"name of the resource (default: {RESOURCE})"
    )
    arguments.add_logging()
    return arguments.parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= PER_NODE_MAX:
        raise argparse.ArgumentTypeError(f"not a count: {text!r}, expected 1 to {PER_NODE_MAX}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
