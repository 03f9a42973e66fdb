"""Jobs of a cluster with those that were deleted, as the console's port: the latter by their records in buckets."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, TypeVar

from polyreme.console.commands import Commands
from polyreme.console.guard import RefusedRequestError
from polyreme.console.log_lines import LINES, cut_line
from polyreme.console.run_source import LogPart, Offer, RunCurves, RunList, RunName, RunQuery
from polyreme.plugin.console.bucket_reader import BucketReader, JobSteps
from polyreme.plugin.console.job_list import page_of, row_of
from polyreme.plugin.console.past_overview import deleted_overview, earlier_jobs
from polyreme.plugin.console.past_records import DELETED, PastJob, PastRecords
from polyreme.plugin.console.source import ClusterSource, Reach
from polyreme.plugin.console.worker_lines import WORKERS_MAX
from polyreme.plugin.reading import NoJobError
from polyreme.report.comparison import ComparedRun
from polyreme.run_files.stored_logs import StoredLogs, location, stored_logs
from polyreme_api.clock import Clock
from polyreme_api.differences import leaves
from polyreme_api.errors import RefusedError
from polyreme_api.labels import API_VERSION, KIND_JOB
from polyreme_api.urls import is_bucket

T = TypeVar("T")


class SourceWithPast(ClusterSource):
    """The jobs that one user sees, and the records of jobs below the locations that this user has named.

    A name that the API server has is the job there; of another name the newest record counts.

    Args:
        reach: The cluster, as the user reaches it.
        commands: Runs the check of a job.
        clock: Of this machine.
        namespace: Where the source looks by itself.
        buckets: Reads what jobs left in buckets.
        past: The records.
    """

    def __init__(
        self,
        reach: Reach,
        commands: Commands,
        clock: Clock,
        *,
        namespace: str,
        buckets: BucketReader,
        past: PastRecords,
    ) -> None:
        super().__init__(reach, commands, clock, namespace=namespace, buckets=buckets)
        self._past = past

    @property
    def states(self) -> Sequence[str]:
        """States by which a person filters."""
        return (*super().states, DELETED)

    async def find(self, query: RunQuery) -> RunList:
        """Return a page of the jobs of a namespace, deleted ones included."""
        seen, past = await asyncio.gather(self.list_jobs(query), self._past.look())
        there = {
            RunName(namespace=item["metadata"]["namespace"], name=item["metadata"]["name"])
            for item in seen.manifests.values()
        }
        listed = self.listed_namespace(query)
        rows = [row_of(seen, job, defaults=True) for job in seen.jobs]
        rows += [jobs[0].row for run, jobs in past.jobs.items() if listed in {None, run.namespace} and run not in there]
        return dataclasses.replace(page_of(rows, query), notes=past.said)

    async def manifest(self, run: RunName) -> Mapping[str, Any]:
        """Return a job; a deleted one without its pod template, which is not recorded."""

        async def of(jobs: Sequence[PastJob]) -> Mapping[str, Any]:
            metadata = {"namespace": run.namespace, "name": run.name}
            return {"apiVersion": API_VERSION, "kind": KIND_JOB, "metadata": metadata, "spec": jobs[0].record.spec}

        return await self._either(run, super().manifest(run), of)

    async def overview(self, run: RunName) -> str:
        """Return what is known of a job, and of deleted ones of its name."""
        live_overview, live_manifest = super().overview, super().manifest

        async def live() -> str:
            page = await live_overview(run)
            jobs = (await self._past.look()).jobs.get(run)
            if not jobs:
                return page
            uid = (await live_manifest(run))["metadata"]["uid"]
            return page + earlier_jobs([job for job in jobs if job.uid != uid], jobs[0])

        async def of(jobs: Sequence[PastJob]) -> str:
            return deleted_overview(jobs[0], await self.read_steps(jobs[0].root)) + earlier_jobs(jobs[1:], jobs[0])

        return await self._either(run, live(), of)

    async def compared(self, run: RunName) -> RunCurves:
        """Return a job's spec, figures and steps."""

        async def of(jobs: Sequence[PastJob]) -> RunCurves:
            return compared(jobs[0], await self.read_steps(jobs[0].root))

        return await self._either(run, super().compared(run), of)

    async def logs(self, run: RunName, name: str) -> LogPart:
        """Return the last lines of a worker; of a deleted job those of a rank that its launcher stored."""

        async def of(jobs: Sequence[PastJob]) -> LogPart:
            return await asyncio.to_thread(lambda: log_part(stored_logs(jobs[0].root), name))

        return await self._either(run, super().logs(run, name), of)

    async def offers(self, run: RunName) -> Sequence[Offer]:
        """Return the actions that fit a job now; a deleted one has none."""

        async def of(jobs: Sequence[PastJob]) -> Sequence[Offer]:
            del jobs
            return ()

        return await self._either(run, super().offers(run), of)

    async def _either(self, run: RunName, live: Awaitable[T], of: Callable[[Sequence[PastJob]], Awaitable[T]]) -> T:
        """Return what is known of a job; where the API server has none of that name, of its records."""
        try:
            return await live
        except NoJobError:
            past = await self._past.look()
            if jobs := past.jobs.get(run):
                return await of(jobs)
            if not past.searched:
                words = f"no job {run.whole} is in the cluster; deleted jobs are still looked for"
                raise RefusedRequestError(503, f"{words}, this page looks again by itself") from None
            raise


def compared(job: PastJob, steps: JobSteps) -> RunCurves:
    """Return what a comparison shows of a deleted job."""
    spec = {**dict(leaves("spec", job.record.spec)), "spec.workers.template": "not recorded"}
    figures = {"step": int(steps.curve.step[-1]) if steps.curve.step else None, **steps.figures}
    said = ComparedRun(spec=spec, figures=figures)
    return RunCurves(run=job.row.run, compared=said, curve=steps.curve, said=steps.said)


def log_part(logs: StoredLogs, name: str) -> LogPart:
    """Return the last stored lines of a rank, of the newest attempt unless another is named.

    Raises:
        RefusedError: If none are stored.
    """
    ordered = sorted(logs.logs, key=lambda log: (-log.attempt, log.rank))[:WORKERS_MAX]
    names = {f"rank {log.rank}, attempt {log.attempt}": log for log in ordered}
    if not names or (name and name not in names):
        raise RefusedError(f"no lines{f' of {name[:64]!r}' if name else ''} are stored under {location(logs.url)}")
    chosen = name or next(iter(names))
    place = location(logs.url, rank=names[chosen].rank, attempt=names[chosen].attempt)
    return LogPart(
        names=tuple(names),
        chosen=chosen,
        lines=[cut_line(line) for line in logs.lines(names[chosen], LINES)],
        place=place,
        command=f"aws s3 cp {place} -" if is_bucket(place) else f"tail {place.removeprefix('file://')}",
    )
