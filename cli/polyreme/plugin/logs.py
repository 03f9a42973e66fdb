"""The lines of one worker's container, as the API server hands them on, and which of them are wanted."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import AsyncIterator

import aiohttp
from aiohttp.connector import NEEDS_CLEANUP_CLOSED

from polyreme_api.errors import InvalidConfigError
from polyreme_api.rank_logs import split_line
from polyreme_cluster.adapters.kubernetes.answers import error_of
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.adapters.kubernetes.resources import object_path
from polyreme_cluster.port import ObjectRef, PortTimeoutError
from polyreme_operator.types.views import JobView

CONNECT_S = 10.0
SILENCE_S = 60.0
"""A log that is not followed comes at once."""
LINE_BYTES_MAX = 1 << 20
"""Bytes that are shown of a line; launchers cut lines long before, other containers may not."""
_TIME = re.compile(r"([0-9-]{10}T[0-9:]{8})(?:\.([0-9]{1,9}))?(Z|[+-][0-9:]{5})")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """Which lines are shown of a worker's log."""

    rank: int | None = None
    attempt: int | None = None

    @property
    def everything(self) -> bool:
        """Whether the launcher's own lines are shown too."""
        return self.rank is None and self.attempt is None

    def takes(self, line: str) -> bool:
        """Tell whether a line is shown."""
        if self.everything:
            return True
        log, _ = split_line(line)
        return log is not None and self.rank in {None, log.rank} and self.attempt in {None, log.attempt}


class Position:
    """How far a log was read, so that the next connection continues with the line after that."""

    def __init__(self) -> None:
        self._newest = (0, 0)
        """Time of the newest line [s, ns]; lines may have the same."""
        self._at_newest = self._seen = 0
        """Lines of that time that were read, and by the present connection."""
        self.since: str | None = None
        """That time as the API server wrote it; it begins a log at a whole second."""

    def reconnected(self) -> None:
        """Note that lines may come again."""
        self._seen = 0

    def take(self, text: str) -> str | None:
        """Take the next line with its time; return it without, or None if it was read before."""
        stamp, _, line = text.partition(" ")
        found = _TIME.fullmatch(stamp)
        if found is None:
            return text
        second, fraction, offset = found.groups()
        seconds = int(datetime.datetime.fromisoformat(second + offset).timestamp())
        at = seconds, int(f"{fraction or '':0<9}")
        if at < self._newest:
            return None
        if at > self._newest:
            self._newest, self._at_newest, self._seen, self.since = at, 0, 0, stamp
        self._seen += 1
        if self._seen <= self._at_newest:
            return None
        self._at_newest = self._seen
        return line


def index_of_rank(job: JobView, rank: int) -> int:
    """Return which worker runs a rank: ranks are counted through the workers.

    Raises:
        InvalidConfigError: If the job has no such rank.
    """
    workers, devices = size_of(job)
    if not 0 <= rank < workers * devices:
        raise InvalidConfigError(
            f"no rank {rank} in {job.namespace}/{job.name}, expected 0 to {workers * devices - 1}", field="--rank"
        )
    return rank // devices


def size_of(job: JobView) -> tuple[int, int]:
    """Return how many workers a job has, and ranks each of them: of its newest attempt, or as its spec asks."""
    attempt = job.attempt
    if attempt is not None:
        return attempt.replicas, attempt.devices
    return (1, 1) if job.spec is None else (job.spec.workers.replicas, job.spec.workers.devices)


async def read_lines(
    connection: Connection,
    ref: ObjectRef,
    container: str,
    position: Position,
    *,
    follow: bool = False,
    tail: int | None = None,
    previous: bool = False,
) -> AsyncIterator[str]:
    """Yield the lines of a pod's container that were not read yet.

    Raises:
        PortError: If the pod is gone, its container has not started, the caller may not read logs, or there is no
            answer.
    """
    what = f"log of {ref}"
    query = {"container": container, "timestamps": "true", "follow": str(follow).lower()}
    query |= {"previous": "true"} if previous else {}
    if tail is not None:
        query["tailLines"] = str(tail)
    if position.since is not None:
        query["sinceTime"] = position.since
    position.reconnected()
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
            async for raw in _lines(response.content.iter_any()):
                line = position.take(raw.decode(errors="replace"))
                if line is not None:
                    yield line
    except (TimeoutError, aiohttp.ClientError) as error:
        raise PortTimeoutError(f"{what} broke off: {type(error).__name__}") from error


async def _lines(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line[:LINE_BYTES_MAX]
        rest = rest[:LINE_BYTES_MAX]
    if rest:
        yield rest
