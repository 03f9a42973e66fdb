"""Follows the logs of all workers of a job, over restarts and replaced pods, until the job has ended."""

from __future__ import annotations

import asyncio
import dataclasses
from collections import deque
from collections.abc import Awaitable, Callable

from polyreme.plugin.log_view import Wanted, Workers
from polyreme.plugin.logs import Position, read_lines
from polyreme.plugin.reading import list_all, read_job
from polyreme.plugin.rows import message_of, state_of
from polyreme.plugin.snapshot import read_view
from polyreme.views.output import note
from polyreme_api.errors import NotFoundError, RefusedError
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import ClusterPort, PortError
from polyreme_operator.types.views import PodPhase, PodView

POLL_S = 1.0
"""How often the job's pods are looked at."""
FOLLOWED_MAX = 512
"""Pods that are followed at once: each takes a connection to the API server and one from there to a kubelet."""
READS_MAX = 10
"""Times in a row that the log of a container that has ended may fail to be read before it is given up."""
LOOKS_AFTER = 3
"""Looks after which all lines of an attempt have come that another one has followed."""
FAILURES_MAX = 60
"""Looks in a row that may fail before following ends."""


class Follower:
    """Follows what was asked for.

    Args:
        cluster: The cluster.
        connection: Its address and credentials.
        asked: What.
        take: Takes each line.
        sleep: Waits between two looks.
    """

    def __init__(
        self,
        cluster: ClusterPort,
        connection: Connection,
        asked: Wanted,
        take: Callable[[str], object],
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._cluster, self._connection, self._asked, self._take = cluster, connection, asked, take
        self._sleep = sleep
        self._streams: dict[str, _Stream] = {}
        self._noted = ""
        self._looks_after = 0
        """Looks since another attempt followed the one that was asked for."""
        self._first = True
        """Whether this is the first look: older lines are shown of the pods that it finds, as far as asked for."""

    async def run(self) -> None:
        """Follow until the job has ended, or the attempt that was asked for.

        Raises:
            RefusedError: If there are too many pods.
            PortError: If the API server does not answer for long.
        """
        failures = 0
        try:
            while True:
                try:
                    if await self._look():
                        return
                    failures = 0
                except PortError as error:
                    failures += 1
                    if failures >= FAILURES_MAX:
                        raise
                    self._note(str(error))
                await self._sleep(POLL_S)
        finally:
            for stream in self._streams.values():
                if stream.task is not None:
                    stream.task.cancel()

    async def _look(self) -> bool:
        """Follow the pods that there are now; return whether nothing more will come."""
        asked = self._asked
        try:
            job = read_view(await read_job(self._cluster, asked.job.namespace, asked.job.name))
        except NotFoundError:
            job = None
        if job is None or job.uid != asked.job.uid:
            self._note(f"{asked.job.namespace}/{asked.job.name} has been deleted")
            return not self._active
        workers = Workers(asked, await list_all(self._cluster, "Pod", namespace=job.namespace))
        if len(workers.pods) > FOLLOWED_MAX:
            raise RefusedError(
                f"{job.namespace}/{job.name} has {len(workers.pods)} workers, at most {FOLLOWED_MAX} are followed at "
                "once; choose one",
                field="--rank or --index",
            )
        present = {pod.uid for pod in workers.job_pods}
        self._streams = {uid: stream for uid, stream in self._streams.items() if uid in present or stream.active}
        for pod in workers.pods.values():
            self._follow(workers, pod)
        self._first = False
        if not self._active:
            self._note(f"{job.namespace}/{job.name} {state_of(job)[0]}: {message_of(job)}".rstrip(": "))
        if job.status.finished:
            streams = [self._streams[pod.uid] for pod in workers.pods.values()]
            return not self._active and all(stream.complete for stream in streams if stream.begun)
        attempt = asked.selection.attempt
        if attempt is not None and job.attempt is not None and job.attempt.number > attempt:
            self._looks_after += 1
        return self._looks_after >= LOOKS_AFTER

    @property
    def _active(self) -> bool:
        return any(stream.active for stream in self._streams.values())

    def _follow(self, workers: Workers, pod: PodView) -> None:
        """Follow a pod whose container has started, unless that is being done or all of it was read."""
        older = self._first and pod.phase is not PodPhase.PENDING
        stream = self._streams.setdefault(pod.uid, _Stream(tail=self._asked.tail if older else None))
        if stream.task is not None and stream.task.done():
            error = stream.task.exception()
            if error is None:
                stream.complete, stream.failures = stream.last, 0
            elif isinstance(error, PortError):
                stream.failures += 1
                stream.complete = stream.last and stream.failures >= READS_MAX
                self._note(f"worker {pod.index}: {error}")
            else:
                raise error
            stream.task = None
        if stream.task is None and not stream.complete and pod.phase is not PodPhase.PENDING:
            # What is read after the container has ended is all that there will be.
            stream.last, stream.begun = pod.ended, True
            stream.task = asyncio.get_running_loop().create_task(self._read(workers, pod, stream))

    async def _read(self, workers: Workers, pod: PodView, stream: _Stream) -> None:
        selection, container = self._asked.selection, workers.container(pod)
        # Once a line was read, a connection that broke is continued there.
        tail = stream.tail if stream.position.since is None else None
        if tail is not None and not selection.everything:
            kept = deque[str](maxlen=tail)
            try:
                async for line in read_lines(self._connection, pod.ref, container, stream.position):
                    if selection.takes(line):
                        kept.append(line)
            finally:
                for line in kept:
                    self._take(workers.shown(pod, line))
            tail = None
        lines = read_lines(self._connection, pod.ref, container, stream.position, follow=True, tail=tail)
        async for line in lines:
            if selection.takes(line):
                self._take(workers.shown(pod, line))

    def _note(self, words: str) -> None:
        """Tell a person what has changed, once."""
        if words != self._noted:
            self._noted = words
            note(words)


@dataclasses.dataclass(slots=True, kw_only=True)
class _Stream:
    """Log of one pod."""

    tail: int | None
    """Last lines that are shown of what was written before; None: all."""
    position: Position = dataclasses.field(default_factory=Position)
    task: asyncio.Task[None] | None = None
    begun: bool = False
    last: bool = False
    """Whether the container had ended when reading began."""
    failures: int = 0
    """Times in a row that it could not be read."""
    complete: bool = False
    """Whether nothing more is read of it."""

    @property
    def active(self) -> bool:
        """Whether it is being read."""
        return self.task is not None and not self.task.done()
