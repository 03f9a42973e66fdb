"""The output of ``logs``: lines of a job's pods, and where those are gone, what its launchers have stored."""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from polyreme.plugin.logs import Position, Selection, index_of_rank, read_lines, size_of
from polyreme.plugin.rows import message_of, state_of
from polyreme.run_files.stored_logs import location, stored_logs
from polyreme.views.output import note
from polyreme_api import environment
from polyreme_api.errors import InvalidConfigError, NotFoundError, PolyremeError, RefusedError
from polyreme_api.labels import LABEL_JOB
from polyreme_api.rank_logs import split_line
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import Manifest, PortError
from polyreme_operator.cache.pods import is_worker_of
from polyreme_operator.types.parse import parse_pod
from polyreme_operator.types.views import JobView, PodView


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What was asked for."""

    job: JobView
    selection: Selection
    indices: frozenset[int] | None
    """Workers; None: all."""
    tail: int | None
    """Last lines: of the rank, or else of each worker. None: all."""

    def __str__(self) -> str:
        """Write ``rank 3 in attempt 2 of team/big``."""
        rank, attempt = self.selection.rank, self.selection.attempt
        worker = f"worker {min(self.indices)}" if self.indices else "any rank"
        what = worker if rank is None else f"rank {rank}"
        return f"{what}{'' if attempt is None else f' in attempt {attempt}'} of {self.job.namespace}/{self.job.name}"

    @property
    def workers(self) -> frozenset[int]:
        """Indices of the workers that are shown."""
        return self.indices if self.indices is not None else frozenset(range(size_of(self.job)[0]))


def wanted(job: JobView, *, rank: int | None, index: int | None, attempt: int | None, tail: int | None) -> Wanted:
    """Check what was asked for.

    Raises:
        InvalidConfigError: If the job has no such rank or worker.
        NotFoundError: If it has no such attempt yet.
    """
    newest = 0 if job.attempt is None else job.attempt.number
    if attempt is not None and attempt > newest:
        known = f"its newest is {newest}" if newest else "it has none yet"
        raise NotFoundError(f"no attempt {attempt} of {job.namespace}/{job.name}: {known}", field="--attempt")
    workers, devices = size_of(job)
    if rank is not None:
        # An earlier attempt may have had more workers.
        index = rank // devices if attempt not in {None, newest} else index_of_rank(job, rank)
    elif index is not None and index >= workers and attempt in {None, newest}:
        raise InvalidConfigError(
            f"no worker {index} in {job.namespace}/{job.name}, expected 0 to {workers - 1}", field="--index"
        )
    if names_no_ranks(job) and (rank is not None or attempt is not None):
        if attempt not in {None, newest}:
            raise NotFoundError(
                f"no lines of attempt {attempt} of {job.namespace}/{job.name}: its containers bring their own training "
                "(workers.runtime.mode), each attempt has pods of its own, and nothing is stored of them"
            )
        if rank is not None:
            note(f"containers of {job.name} bring their own training: all lines of worker {index} are shown")
        rank = attempt = None
    indices = None if index is None else frozenset({index})
    return Wanted(job=job, selection=Selection(rank=rank, attempt=attempt), indices=indices, tail=tail)


def names_no_ranks(job: JobView) -> bool:
    """Tell whether a job's containers run without our launcher, so that no line names its rank."""
    return job.spec is not None and job.spec.workers.runtime.mode == "Environment"


class Workers:
    """Pods of a job, by the place that they fill: the newest of each.

    Args:
        asked: What was asked for.
        found: Pods of the job's namespace.
    """

    def __init__(self, asked: Wanted, found: Sequence[Manifest]) -> None:
        self.pods: dict[int, PodView] = {}
        self._manifests: Mapping[str, Manifest] = {item["metadata"]["uid"]: item for item in found}
        self.job_pods = [pod for pod in map(parse_pod, found) if pod is not None and is_worker_of(asked.job, pod)]
        for pod in sorted(self.job_pods, key=lambda pod: (pod.index, pod.replacement)):
            if asked.indices is None or pod.index in asked.indices:
                self.pods[pod.index] = pod
        self.several = asked.indices is None and size_of(asked.job)[0] > 1

    def container(self, pod: PodView) -> str:
        """Name of the container whose log counts."""
        return str(self._manifests[pod.uid]["spec"]["containers"][0]["name"])

    def shown(self, pod: PodView, line: str) -> str:
        """Return a line as it is shown: where lines of several workers are, one that names no rank names its worker."""
        return f"[worker {pod.index}] {line}" if self.several and split_line(line)[0] is None else line

    def root(self, job: JobView) -> str | None:
        """URL of the job's checkpoint root; None if it is not on record."""
        if job.status.checkpoint_location:
            return job.status.checkpoint_location
        for pod in self.job_pods:
            for entry in self._manifests[pod.uid]["spec"]["containers"][0].get("env") or []:
                if entry.get("name") == environment.CHECKPOINT_URL and entry.get("value"):
                    return str(entry["value"])
        return None if job.spec is None else job.spec.checkpoint.location


async def show(
    connection: Connection, asked: Wanted, workers: Workers, take: Callable[[str], object], *, previous: bool = False
) -> None:
    """Show the lines that there are now.

    Raises:
        NotFoundError: If there are none, saying where they are or why not.
        EnvironmentFailedError: If they are where this machine can't read.
        PortError: If the only pod's log can't be read, and nothing is stored.
    """
    troubles: dict[int, PortError] = {}
    read: set[int] = set()
    for index, pod in workers.pods.items():
        try:
            if await _show_pod(connection, asked, workers, pod, take, previous=previous):
                read.add(index)
        except PortError as error:
            troubles[index] = error
    if read and (asked.selection.attempt is None or read >= asked.workers):
        _note(troubles)
        return
    try:
        stored = _show_stored(asked, workers, read, take)
    except PolyremeError as error:
        if not read:
            raise
        note(str(error))
        stored = 0
    if not stored and not read:
        if troubles:
            raise next(iter(troubles.values()))
        raise NotFoundError(nothing(asked, workers))
    _note(troubles)


def _note(troubles: Mapping[int, PortError]) -> None:
    for index, error in troubles.items():
        note(f"worker {index}: {error}")


async def _show_pod(
    connection: Connection,
    asked: Wanted,
    workers: Workers,
    pod: PodView,
    take: Callable[[str], object],
    *,
    previous: bool,
) -> int:
    """Show the lines of one pod; return how many."""
    selection, count = asked.selection, 0
    # The API server knows no ranks: of one, the last lines are chosen here.
    kept = None if asked.tail is None or selection.everything else deque[str](maxlen=asked.tail)
    tail = asked.tail if selection.everything else None
    lines = read_lines(connection, pod.ref, workers.container(pod), Position(), tail=tail, previous=previous)
    async for line in lines:
        if not selection.takes(line):
            continue
        count += 1
        if kept is None:
            take(workers.shown(pod, line))
        else:
            kept.append(workers.shown(pod, line))
    for line in kept or ():
        take(line)
    return count


def _show_stored(asked: Wanted, workers: Workers, read: set[int], take: Callable[[str], object]) -> int:
    """Show what is stored of the ranks whose pods had no lines; return how many logs.

    Raises:
        EnvironmentFailedError: If this machine can't read the checkpoint root.
        NotFoundError: If that is a folder that this machine does not have, or has lines of other attempts.
    """
    job, rank, attempt = asked.job, asked.selection.rank, asked.selection.attempt
    root = workers.root(job)
    if root is None or names_no_ranks(job) or job.attempt is None:
        return 0
    logs = stored_logs(root, rank=rank, attempt=attempt)
    devices = size_of(job)[1]
    chosen = [
        log
        for log in logs.chosen(rank=rank, attempt=attempt)
        if (index := log.rank // devices) not in read and (asked.indices is None or index in asked.indices)
    ]
    for log in chosen:
        for line in logs.lines(log, asked.tail):
            take(f"{log.prefix}{line}")
    if not chosen and not read and logs.logs:
        raise logs.nothing_of(f"{job.namespace}/{job.name}", rank=rank, attempt=attempt)
    return len(chosen)


def stored_lines(asked: Wanted, workers: Workers) -> list[str]:
    """Return what is stored of ranks whose pods are gone.

    Raises:
        EnvironmentFailedError: If this machine can't read the checkpoint root.
        NotFoundError: If that has lines of other attempts alone.
        RefusedError: If nothing is stored.
    """
    lines = list[str]()
    if not _show_stored(asked, workers, set(), lines.append):
        raise RefusedError(nothing(asked, workers))
    return lines


def nothing(asked: Wanted, workers: Workers) -> str:
    """Say why there is no line, and where one may be."""
    job = asked.job
    name = f"{job.namespace}/{job.name}"
    state, _ = state_of(job)
    if job.attempt is None:
        why = message_of(job)
        return f"{name} has had no attempt, so no rank has written anything: {state}{f': {why}' if why else ''}"
    lost = (
        "of a pod that was killed at once, or with its node, only a log collector of the cluster can have lines: look "
        f"for pods with the label {LABEL_JOB}={job.name}"
    )
    if workers.pods:
        return (
            f"no lines of {asked}: the log of its pod has none; a launcher of an older release keeps them in files of "
            f"its pod alone; {lost}"
        )
    root = workers.root(job)
    if root is None:
        return f"no lines of {asked}: its pods are gone, and its checkpoint root is not on record; {lost}"
    succeeded = "; those of an attempt that succeeded are not stored" if state == "Succeeded" else ""
    return f"no lines of {asked}: its pods are gone, and nothing is stored under {location(root)}{succeeded}; {lost}"
