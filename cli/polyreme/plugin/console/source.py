"""Jobs of a cluster as the console's port: each read and each write is one call of the API server, as its user.

There are no rights here: the API server allows or refuses, and its refusal is the page's sentence.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

from polyreme.console.commands import Commands
from polyreme.console.guard import RefusedRequestError
from polyreme.console.job_form import as_yaml, options_of
from polyreme.console.run_source import (
    ALL_NAMESPACES,
    LogPart,
    Number,
    Offer,
    RunCurves,
    RunList,
    RunName,
    RunQuery,
    Verdict,
)
from polyreme.plugin import change
from polyreme.plugin.console.bucket_reader import BucketReader, JobSteps
from polyreme.plugin.console.job_list import named_states, page_of, row_of
from polyreme.plugin.console.overview import JobSight, overview
from polyreme.plugin.console.worker_lines import WorkerLines
from polyreme.plugin.identity import who_acts
from polyreme.plugin.operator_lease import doubt_of, silence
from polyreme.plugin.reading import NotAllowedError, Sight, list_all, look, read_job
from polyreme.plugin.rows import progress_of
from polyreme.plugin.snapshot import Snapshot, read_view
from polyreme.plugin.waiting import is_waiting
from polyreme.plugin.why import Answer, why
from polyreme.report.comparison import ComparedRun
from polyreme_api.clock import Clock
from polyreme_api.differences import leaves
from polyreme_api.errors import InvalidConfigError, NotFoundError, PolyremeError, RefusedError
from polyreme_api.fields import REPLICAS_MAX
from polyreme_api.job.accounting import goodput_of
from polyreme_api.job.load import parse_job
from polyreme_api.labels import KIND_JOB
from polyreme_cluster.adapters.kubernetes.connection import Connection
from polyreme_cluster.port import (
    ClusterPort,
    ForbiddenError,
    Manifest,
    PortError,
    PortTimeoutError,
    ServerError,
    TooManyRequestsError,
    UnauthorizedError,
)
from polyreme_operator.types.views import JobView

POLL_S = 5.0
_OF_QUEUES: dict[str, str | None] = dict.fromkeys((KIND_JOB, "TrainingQueue", "Node"))


class Reach(Protocol):
    """A cluster as one user reaches it."""

    @property
    def cluster(self) -> ClusterPort:
        """Its API."""
        ...

    @property
    def connection(self) -> Connection:
        """Address and credentials, for logs, which the port has not."""
        ...

    @property
    def unauthorized(self) -> tuple[int, str]:
        """Status and sentence for credentials that the API server does not accept."""
        ...


class ClusterSource:
    """The jobs that one user sees.

    Args:
        reach: The cluster, as the user reaches it.
        commands: Runs the check of a job.
        clock: Of this machine.
        namespace: Where the source looks by itself.
        buckets: Reads what jobs left in buckets; None: that may not be read.
    """

    poll_s = POLL_S
    first_step = "kubectl apply -f job.yaml"

    def __init__(
        self, reach: Reach, commands: Commands, clock: Clock, *, namespace: str, buckets: BucketReader | None = None
    ) -> None:
        self._reach, self._commands, self._clock, self._buckets = reach, commands, clock, buckets
        self.namespace = namespace

    @property
    def states(self) -> Sequence[str]:
        """States by which a person filters."""
        return named_states()

    async def namespaces(self) -> Sequence[str]:
        """Return the namespaces, if the user may list them."""
        with self._in_words():
            return [str(item["metadata"]["name"]) for item in await list_all(self._cluster, "Namespace")]

    async def user(self) -> str:
        """Return the name under which the API server knows the user."""
        with self._in_words():
            return await who_acts(self._cluster)

    async def look(self, wanted: Mapping[str, str | None], **options: Any) -> Sight:
        """Read kinds that a page shows, as ``plugin.reading.look``."""
        with self._in_words():
            return await look(self._cluster, wanted, now_s=self._clock.now_s(), **options)

    async def find(self, query: RunQuery) -> RunList:
        """Return a page of the jobs of a namespace."""
        seen = await self.list_jobs(query)
        return page_of((row_of(seen, job) for job in seen.jobs), query)

    def listed_namespace(self, query: RunQuery) -> str | None:
        """Return the namespace that a query lists; None: all of them."""
        namespace = query.namespace or self.namespace
        return None if namespace in {"", ALL_NAMESPACES} else namespace

    async def list_jobs(self, query: RunQuery) -> Snapshot:
        """Read the jobs of the namespace that a query lists."""
        listed = self.listed_namespace(query)
        return (await self.look({KIND_JOB: listed, "Lease": listed}, needed=(KIND_JOB,))).seen

    async def manifest(self, run: RunName) -> Mapping[str, Any]:
        """Return a job."""
        with self._in_words():
            return await read_job(self._cluster, run.namespace, run.name)

    async def overview(self, run: RunName) -> str:
        """Return what is known of a job."""
        with self._in_words():
            seen = await self._job_sight(run)
        return overview(seen, await self.read_steps(seen.job.status.checkpoint_location))

    def pages(self, run: RunName) -> Sequence[tuple[str, str]]:
        """Return none: a cluster has no files."""
        del run
        return ()

    async def compared(self, run: RunName) -> RunCurves:
        """Return a job's spec, figures and steps."""
        with self._in_words():
            manifest = await read_job(self._cluster, run.namespace, run.name)
        sight = await self.look({"Lease": run.namespace}, known=[manifest])
        job, spec = sight.job(manifest["metadata"]["uid"]), parse_job(manifest).spec
        record = progress_of(sight.seen, job)
        steps = await self.read_steps(job.status.checkpoint_location)
        figures = {
            "attempts": job.attempt.number if job.attempt is not None else 0,
            "step": max(job.status.step, record.step if record is not None else 0),
            "loss": record.loss if record is not None else None,
            "heldoutLoss": record.held_out_loss if record is not None else None,
            "goodputRatio": goodput_of(job.status.accounting.table),
            "tokensPerSecond": record.tokens_per_second if record is not None else None,
            **steps.figures,
        }
        written = dict(leaves("spec", spec.model_dump(mode="json", by_alias=True)))
        said = ComparedRun(spec=written, figures=figures)
        return RunCurves(run=run, compared=said, curve=steps.curve, said=steps.said)

    def compare_command(self, runs: Sequence[RunName]) -> str:
        """Return nothing: no command compares jobs of a cluster."""
        del runs
        return ""

    async def logs(self, run: RunName, name: str) -> LogPart:
        """Return the last lines of a worker's pod; where that is gone, those that its launcher stored in a bucket."""
        with self._in_words():
            job = read_view(await read_job(self._cluster, run.namespace, run.name))
            pods = await list_all(self._cluster, "Pod", namespace=run.namespace)
            lines = WorkerLines(job, pods, name)
            place, shown = await lines.read(self._reach.connection, self._buckets)
        return LogPart(
            names=lines.names,
            chosen=lines.names[lines.index],
            lines=shown,
            place=place,
            command=f"{_typed('logs', run)} --index {lines.index} -f",
        )

    async def offers(self, run: RunName) -> Sequence[Offer]:
        """Return the actions that fit a job now."""
        with self._in_words():
            job = read_view(await read_job(self._cluster, run.namespace, run.name))
        delete = Offer(
            name="delete",
            title="Delete",
            says="Deletes the job and its pods without a last checkpoint. Checkpoints already written stay.",
            command=_typed("cancel", run),
            harmful=True,
        )
        if job.status.finished or job.spec is None or job.deleting:
            return (delete,)
        return (*_changes(run, job), delete)

    async def act(self, run: RunName, action: str, number: int | None) -> None:
        """Change a job."""
        with self._in_words():
            if action == "delete":
                await change.cancel(self._cluster, run.namespace, run.name)
                return
            if action == "scale":
                if number is None:
                    raise InvalidConfigError("scale needs the number of workers", field="number")
                wish = change.scale_to(number)
            elif action in {"suspend", "resume"}:
                wish = change.suspend if action == "suspend" else change.resume
            else:
                raise NotFoundError(f"no action {action[:64]!r}")
            await change.change(self._cluster, run.namespace, run.name, wish)

    async def check(self, manifest: Mapping[str, Any]) -> Verdict:
        """Have the planner, then the API server in a dry run, then the order of the queue speak about a job."""
        verdict = await self._commands.verdict(as_yaml(manifest), "--for-cluster")
        if not verdict.good:
            return verdict
        try:
            with self._in_words():
                created = await self._cluster.create(self._placed(manifest), dry_run=True)
        except RefusedError as error:
            return Verdict(good=False, said=str(error), plan=verdict.plan)
        notes = ("The API server accepts it (dry run).", await self._forecast(created), *verdict.notes)
        return Verdict(good=True, said="", notes=[note for note in notes if note], plan=verdict.plan)

    async def submit(self, manifest: Mapping[str, Any]) -> RunName:
        """Create a job."""
        verdict = await self._commands.verdict(as_yaml(manifest), "--for-cluster")
        if not verdict.good:
            raise InvalidConfigError(verdict.said)
        with self._in_words():
            await self._cluster.create(self._placed(manifest), dry_run=True)
            made = await self._cluster.create(self._placed(manifest))
        return RunName(namespace=made["metadata"]["namespace"], name=made["metadata"]["name"])

    def submit_command(self, settings: Sequence[str]) -> str:
        """Return what creates the job."""
        if not settings:
            return "kubectl create -f job.yaml"
        return f"polyreme validate job.yaml --for-cluster {options_of(settings)} -o yaml | kubectl create -f -"

    @property
    def _cluster(self) -> ClusterPort:
        return self._reach.cluster

    def _placed(self, manifest: Mapping[str, Any]) -> Manifest:
        metadata = {"namespace": self.namespace or "default", **manifest["metadata"]}
        return {**manifest, "metadata": metadata}

    async def read_steps(self, root: str) -> JobSteps:
        """Read a job's steps, off the loop: a bucket is far. What keeps them away hides nothing else."""
        if self._buckets is None:
            return JobSteps()
        try:
            return await asyncio.to_thread(self._buckets.steps, root)
        except PolyremeError as error:
            return JobSteps(said=str(error)[:300])

    async def _job_sight(self, run: RunName) -> JobSight:
        manifest, space = await read_job(self._cluster, run.namespace, run.name), run.namespace
        now_s = self._clock.now_s()
        kinds: dict[str, str | None] = dict.fromkeys(("Pod", "Lease", "Event"), space)
        # Its place, and the jobs that it preempts; a job that does not wait has neither.
        waits = is_waiting(read_view(manifest))
        sight = await look(
            self._cluster, kinds | (_OF_QUEUES if waits else {}), home=space, known=[manifest], now_s=now_s
        )
        job = sight.job(manifest["metadata"]["uid"])
        doubt = doubt_of(job, await silence(self._cluster, now_s), now_s)
        whole = not sight.lacks(*_OF_QUEUES)
        lines = sight.left_out("How its pods are is not shown", "Pod")
        lines += sight.left_out("Phase, pace and loss are not shown", "Lease")
        lines += sight.left_out("Events are not shown", "Event")
        lines += sight.left_out("Its exact place and the jobs that it preempts are not shown", *_OF_QUEUES)
        answer = why(sight.seen, job, doubt=doubt, whole=whole)
        return JobSight(job=job, sight=sight, answer=answer, doubt=doubt, left_out=lines)

    async def _forecast(self, created: Manifest) -> str:
        """Say where a job would wait, as far as the user may see who waits."""
        metadata = {"resourceVersion": "0", "uid": "new", **created["metadata"]}
        sight = await self.look(
            _OF_QUEUES, home=metadata["namespace"], known=[{**created, "metadata": metadata, "status": {}}]
        )
        job = sight.job(metadata["uid"])
        return forecast(why(sight.seen, job), whole=not sight.hidden)

    @contextlib.contextmanager
    def _in_words(self) -> Iterator[None]:
        """Turn what the API server answers into what a page says."""
        try:
            yield
        except UnauthorizedError as error:
            raise RefusedRequestError(*self._reach.unauthorized) from error
        except (ForbiddenError, NotAllowedError) as error:
            raise RefusedRequestError(403, str(error)) from error
        except (PortTimeoutError, ServerError, TooManyRequestsError) as error:
            raise away(error) from error


def _typed(verb: str, run: RunName) -> str:
    return f"kubectl polyreme {verb} {run.name} -n {run.namespace}"


def _changes(run: RunName, job: JobView) -> list[Offer]:
    spec = job.spec
    if spec is None:
        return []
    if spec.suspend:
        says = "Puts the job back into its queue; it continues from its newest checkpoint."
        return [Offer(name="resume", title="Resume", says=says, command=_typed("resume", run))]
    says = "Saves a checkpoint and stops; the job releases its devices and keeps everything else."
    workers = spec.workers
    number = Number(
        title="Workers",
        value=workers.replicas,
        least=workers.min_replicas or 1,
        most=workers.max_replicas or REPLICAS_MAX,
    )
    return [
        Offer(name="suspend", title="Suspend", says=says, command=_typed("suspend", run)),
        Offer(
            name="scale",
            title="Scale",
            says="Changes the number of workers: a running job saves a checkpoint and continues with a new plan.",
            command=f"{_typed('scale', run)} --replicas {workers.replicas}",
            number=number,
        ),
    ]


def away(error: PortError) -> RefusedRequestError:
    """Return what a page says while the cluster does not answer."""
    return RefusedRequestError(503, f"the cluster does not answer; this page looks again by itself. {str(error)[:300]}")


def forecast(answer: Answer, *, whole: bool) -> str:
    """Say where a job that is not created yet would wait."""
    if answer.position is None:
        return ""
    seen = "" if whole else " of those that you may list"
    return (
        f"In queue {answer.queue} it would be number {answer.position} of {answer.waiting} waiting jobs{seen}; "
        f"{answer.ahead} would be looked at before it."
    )
