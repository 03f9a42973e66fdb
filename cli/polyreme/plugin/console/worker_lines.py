"""The last lines of one worker of a job: of its pod, or those that its launcher stored in a bucket."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from polyreme.console.log_lines import LINES, cut_line
from polyreme.plugin.console.bucket_reader import BucketReader
from polyreme.plugin.log_view import Workers, nothing, stored_lines, wanted
from polyreme.plugin.logs import Position, read_lines, size_of
from polyreme.run_files.stored_logs import location
from polyreme_api.errors import RefusedError
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import Manifest
from polyreme_operator.types.views import JobView

WORKERS_MAX = 40
"""Workers whose logs are offered; kubectl polyreme logs has all."""


class WorkerLines:
    """The log of a worker.

    Args:
        job: The job.
        pods: Of its namespace.
        name: Of the worker, as ``names`` has it; empty: the first one.

    Raises:
        RefusedError: If there is no such worker.
    """

    def __init__(self, job: JobView, pods: Sequence[Manifest], name: str) -> None:
        self.names = [f"worker {index}" for index in range(min(size_of(job)[0], WORKERS_MAX))]
        if name and name not in self.names:
            raise RefusedError(f"run '{job.namespace}/{job.name}' has no log {name[:64]!r}; choose another one")
        self.index = self.names.index(name) if name else 0
        self._asked = wanted(job, rank=None, index=self.index, attempt=None, tail=LINES)
        self._workers = Workers(self._asked, pods)

    async def read(self, connection: Connection, buckets: BucketReader | None) -> tuple[str, list[str]]:
        """Return where the lines are, and the last of them, each cut to what a page shows.

        Raises:
            PortError: If the pod's log can't be read.
            RefusedError: If there are none.
        """
        pod, root = self._workers.pods.get(self.index), self._workers.root(self._asked.job)
        if pod is not None:
            read = read_lines(connection, pod.ref, self._workers.container(pod), Position(), tail=LINES)
            return f"pod {pod.ref.namespace}/{pod.ref.name}", [cut_line(line) async for line in read]
        if root is None or buckets is None or not buckets.reads(root):
            raise RefusedError(nothing(self._asked, self._workers))
        stored = await asyncio.to_thread(stored_lines, self._asked, self._workers)
        return location(root), [cut_line(line) for line in stored[-LINES:]]
