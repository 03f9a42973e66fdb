"""The command that shows what the ranks of a job have written."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from polyreme.plugin.log_follow import Follower
from polyreme.plugin.log_view import Workers, show, wanted
from polyreme.plugin.options import Context, Job, Kubeconfig, Namespace, target
from polyreme.plugin.reading import list_all, read_job
from polyreme.plugin.snapshot import read_view
from polyreme.run_files.stored_logs import stored_logs
from polyreme_api.errors import InvalidConfigError
from polyreme_cluster.port import ClusterPort

TAIL_MAX = 1_000_000
TAIL_OF_EACH = 50
"""Last lines of each worker, where several are shown and no number is given."""


def logs(
    name: Job,
    rank: Annotated[int | None, typer.Option(min=0, help="Show the lines of this rank.")] = None,
    index: Annotated[
        int | None, typer.Option(min=0, help="Show the whole log of the worker of this index. Default: all workers.")
    ] = None,
    attempt: Annotated[int | None, typer.Option(min=1, help="Show the lines of this attempt.")] = None,
    follow: Annotated[
        bool, typer.Option("-f", "--follow", help="Stream new lines, over restarts, until the job has ended.")
    ] = False,
    tail: Annotated[
        int | None,
        typer.Option(
            min=0,
            max=TAIL_MAX,
            help="Show only this many last lines: of the rank, or else of each worker. "
            f"Default: all, and {TAIL_OF_EACH} where several workers are shown.",
        ),
    ] = None,
    previous: Annotated[bool, typer.Option("-p", "--previous", help="Show the log of the previous container.")] = False,
    root: Annotated[
        str | None,
        typer.Option(help="URL of a checkpoint root: show what is stored there, of a job that is deleted too."),
    ] = None,
    namespace: Namespace = None,
    kubeconfig: Kubeconfig = None,
    context: Context = None,
) -> None:
    """Print what the ranks of a job have written, each line with its rank and attempt.

    Lines come from the pods; where those are gone, the last 10,000 of each rank of an attempt that did not succeed are
    in the job's checkpoint root.

    Examples:

      kubectl polyreme logs big -f

      kubectl polyreme logs big --rank 17 --attempt 2 --tail 100

      kubectl polyreme logs big --root s3://bucket/checkpoints/team/big
    """
    if rank is not None and index is not None:
        raise InvalidConfigError("--rank and --index can't be combined; drop one", field="--index")
    if follow and previous:
        raise InvalidConfigError("a container that has ended is not followed; drop --follow or --previous")
    if root is not None:
        if follow or previous or index is not None:
            raise InvalidConfigError("what is stored has ranks and attempts alone; drop -f, -p and --index")
        _print_stored(root, name, rank=rank, attempt=attempt, tail=tail)
        return
    where = target(kubeconfig, context, namespace)

    async def story(cluster: ClusterPort) -> None:
        job = read_view(await read_job(cluster, *where.split(name)))
        lines = TAIL_OF_EACH if tail is None and rank is None and index is None else tail
        asked = wanted(job, rank=rank, index=index, attempt=attempt, tail=lines)
        connection = where.connection()
        if follow and not job.status.finished:
            await Follower(cluster, connection, asked, _print_now).run()
            return
        workers = Workers(asked, await list_all(cluster, "Pod", namespace=job.namespace))
        await show(connection, asked, workers, _print, previous=previous)

    where.run(story)


def _print(line: str) -> None:
    sys.stdout.write(f"{line}\n")


def _print_now(line: str) -> None:
    _print(line)
    sys.stdout.flush()


def _print_stored(url: str, name: str, *, rank: int | None, attempt: int | None, tail: int | None) -> None:
    logs = stored_logs(url, rank=rank, attempt=attempt)
    chosen = logs.chosen(rank=rank, attempt=attempt)
    if not chosen:
        raise logs.nothing_of(name, rank=rank, attempt=attempt)
    for log in chosen:
        for line in logs.lines(log, TAIL_OF_EACH if tail is None and rank is None else tail):
            _print(f"{log.prefix}{line}")
