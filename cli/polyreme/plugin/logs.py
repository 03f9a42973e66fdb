"""The log of one worker: which pod fills its place now, and the lines that the API server hands on."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import aiohttp
from aiohttp.connector import NEEDS_CLEANUP_CLOSED

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_operator.adapters.kubernetes.answers import error_of
from polyreme_operator.adapters.kubernetes.connection import Connection
from polyreme_operator.adapters.kubernetes.resources import object_path
from polyreme_operator.port import ObjectRef, PortTimeoutError
from polyreme_operator.types.views import JobView, PodView

CONNECT_S = 10.0
SILENCE_S = 60.0
"""A log that is not followed comes at once."""


def index_of_rank(job: JobView, rank: int) -> int:
    """Return which worker runs a rank: ranks are counted through the workers.

    Raises:
        InvalidConfigError: If the job has no such rank.
    """
    attempt = job.attempt
    devices = attempt.devices if attempt is not None else job.spec.workers.devices if job.spec is not None else 1
    workers = attempt.replicas if attempt is not None else job.spec.workers.replicas if job.spec is not None else 1
    if not 0 <= rank < workers * devices:
        raise InvalidConfigError(
            f"no rank {rank} in {job.namespace}/{job.name}, expected 0 to {workers * devices - 1}", field="--rank"
        )
    return rank // devices


def pod_of(job: JobView, pods: Iterable[PodView], index: int) -> PodView:
    """Return the newest pod that fills a worker's place.

    Raises:
        NotFoundError: If there is none.
    """
    filled = [pod for pod in pods if pod.job_uid == job.uid and pod.index == index]
    if not filled:
        raise NotFoundError(
            f"no pod of worker {index} of {job.namespace}/{job.name}: it has not been created yet, or is gone; "
            f"see `kubectl polyreme why {job.name}`",
            field="--rank or --index",
        )
    return max(filled, key=lambda pod: pod.replacement)


async def copy(
    connection: Connection,
    ref: ObjectRef,
    container: str,
    take: Callable[[bytes], object],
    *,
    follow: bool = False,
    tail: int | None = None,
    previous: bool = False,
) -> None:
    """Hand on the log of a pod's container as it comes.

    Raises:
        PortError: If the pod is gone, its container has not started, the caller may not read logs, or nobody answers.
    """
    what = f"log of {ref}"
    query = {"container": container, "follow": str(follow).lower(), "previous": str(previous).lower()}
    if tail is not None:
        query["tailLines"] = str(tail)
    connector = aiohttp.TCPConnector(ssl=connection.tls or True, enable_cleanup_closed=NEEDS_CLEANUP_CLOSED)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_S, sock_read=None if follow else SILENCE_S)
    try:
        async with (
            aiohttp.ClientSession(connector=connector, timeout=timeout, trust_env=False) as session,
            session.get(
                f"{connection.url}{object_path(ref, 'log')}",
                params=query,
                headers=await connection.headers(),
                allow_redirects=False,
                server_hostname=connection.server_hostname,
                proxy=connection.proxy,
            ) as response,
        ):
            if response.status >= 300:
                raise error_of(what, response.status, await response.read(), response.headers)
            async for chunk in response.content.iter_any():
                take(chunk)
    except (TimeoutError, aiohttp.ClientError) as error:
        raise PortTimeoutError(f"{what} broke off: {type(error).__name__}") from error
