"""Start of the ranks of a pod: their job and plan on disk, their variables, their descriptors."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from polyreme_api import environment as names
from polyreme_api.environment import PodEnvironment, RankEnvironment
from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import ProgressRecord
from polyreme_api.rank_state import RankState
from polyreme_launcher.data_engine import DataEngine
from polyreme_launcher.pod_logs import PodLogs
from polyreme_launcher.progress_pipe import ProgressPipe
from polyreme_launcher.protocol.follower import ForkRanks
from polyreme_launcher.rank_pages import RankPages
from polyreme_launcher.rank_processes import OnExit, RankParent
from polyreme_launcher.shared_copies import CopyFiles
from polyreme_system.addresses import is_loopback
from polyreme_system.files import write_atomically


class RankStarter:
    """Starts the ranks of one attempt after the other.

    Args:
        parent: Forks them.
        logs: Takes what they write.
        pod: The pod.
        environment: Variables of every rank.
        data_engine: The pod's, if it has one.
        on_progress: Called with every record of rank 0.
        on_not_started: Called for every rank that can't be started, as for one that has ended.
    """

    def __init__(
        self,
        parent: RankParent,
        logs: PodLogs,
        *,
        pod: PodEnvironment,
        environment: Mapping[str, str],
        data_engine: DataEngine | None,
        on_progress: Callable[[ProgressRecord], None],
        on_not_started: OnExit,
    ) -> None:
        self._parent, self._logs, self._pod, self._environment = parent, logs, pod, dict(environment)
        self._data_engine = data_engine
        self._on_progress = on_progress
        self._on_not_started = on_not_started
        directory = Path(pod.pod_directory)
        self._job_file, self._plan_file = directory / "job.json", directory / "plan.json"
        self._pipe: ProgressPipe | None = None
        self._copies = CopyFiles()
        self._pages = RankPages()

    def start(self, order: ForkRanks, ranks: range, *, master: socket.socket | None) -> None:
        """Fork the ranks; one that can't be forked is reported as failed by the machine.

        Args:
            order: The attempt.
            ranks: Ranks of this pod.
            master: Listening socket for the rendezvous, on the leader's pod.
        """
        begun = 0
        try:
            write_atomically(self._job_file, order.directive.job_json, durable=False)
            write_atomically(self._plan_file, order.directive.plan_json, durable=False)
            if self._data_engine is not None:
                self._data_engine.begin_attempt()
            # Of the attempt, not of this pod: a pod outlives a change of the gang's size.
            plan = json.loads(order.directive.plan_json)
            world_size = plan["replicas"] * plan["devices"]
            for rank in ranks:
                self._fork(order, rank, rank - ranks.start, world_size, self._descriptors(rank, master))
                begun += 1
        except OSError as error:
            failed = (int(ExitCode.ENVIRONMENT), None, f"rank can't be started: {error}")
            for rank in ranks[begun:]:
                asyncio.get_running_loop().call_soon(self._on_not_started, order.directive.attempt, rank, *failed)

    def ended(self, rank: int) -> None:
        """Take a rank's end: the last messages of rank 0 are handled before it."""
        if rank == 0 and self._pipe is not None:
            self._pipe.drain()
            self._pipe.close()
            self._pipe = None

    def pages(self) -> dict[int, RankState]:
        """Return what the ranks have recorded, by rank."""
        return self._pages.read(time.monotonic_ns())

    def limit(self, until_ns: int) -> None:
        """Tell the ranks until when they may begin steps (``FenceWatch.until_ns``)."""
        self._pages.limit(until_ns)

    def close(self) -> None:
        """Close the files that ranks share."""
        self._copies.close()
        self._pages.close()

    def _fork(
        self, order: ForkRanks, rank: int, local_rank: int, world_size: int, descriptors: Mapping[str, int]
    ) -> None:
        directive, release = order.directive, order.release
        described = RankEnvironment(
            rank=rank,
            local_rank=local_rank,
            world_size=world_size,
            attempt=directive.attempt,
            master_address=release.master_address,
            master_port=release.master_port,
            master_fd=None,
            progress_fd=None,
            job_file=str(self._job_file),
            plan_file=str(self._plan_file),
            checkpoint_url=self._pod.checkpoint_url,
            resume_from=release.resume_from,
        )
        variables = {**self._environment, **described.render(), "OMP_NUM_THREADS": "1"}
        if is_loopback(release.master_address):
            variables["GLOO_SOCKET_IFNAME"] = "lo"
        with self._logs.open(directive.attempt, rank) as output, self._pages.open(rank, time.monotonic_ns()) as page:
            self._parent.fork(
                attempt=directive.attempt,
                rank=rank,
                environment=variables,
                output=output,
                descriptors={**descriptors, **({} if page is None else {names.PAGE_FD: page})},
            )
        if rank == 0 and self._pipe is not None:
            self._pipe.handed_over()

    def _descriptors(self, rank: int, master: socket.socket | None) -> dict[str, int]:
        files = self._copies.of(rank)
        found = {} if files is None else {names.COPY_DATA_FD: files[0], names.COPY_RECORD_FD: files[1]}
        if self._data_engine is not None and self._data_engine.descriptor is not None:
            found[names.DATA_ENGINE_FD] = self._data_engine.descriptor
        if rank != 0 or master is None:
            return found
        self._pipe = ProgressPipe(self._on_progress)
        return found | {names.MASTER_FD: master.fileno(), names.PROGRESS_FD: self._pipe.write_descriptor}
