"""``polyreme runs``: the runs on this machine."""

from __future__ import annotations

import dataclasses
import os
import shutil
import signal
import sys
import time
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from polyreme.job_files import read_job
from polyreme.report.run_summary import CONTINUES, describe
from polyreme.run_files import logs as run_logs
from polyreme.run_files import stacks as run_stacks
from polyreme.run_files.data import release_run
from polyreme.run_files.identity import read_identity, serving
from polyreme.run_files.paths import PREVIOUS_SUFFIX, Home, RunDirectory
from polyreme.run_files.processes import is_same_process
from polyreme.run_files.records import checkpoint_url, read_records_at
from polyreme.run_files.stored_logs import stored_logs
from polyreme.views.formatting import size
from polyreme.views.output import Format, OutputOption, columns_of, confirm, emit, nearest, note
from polyreme_api.errors import InvalidConfigError, NotFoundError, RefusedError, WaitTimeoutError
from polyreme_api.rank_logs import RankAttempt
from polyreme_system.files import read_json

STOP_POLL_S = 0.1
LOG_LINES_MAX = 10_000


NameArgument = Annotated[str, typer.Argument(help="Name of the run, or NAMESPACE/NAME.")]


def ls(context: typer.Context, output: OutputOption = Format.TABLE) -> None:
    """List the runs: state, attempt, step, loss, and what each is waiting for.

    Example: polyreme runs ls -o json
    """
    home: Home = context.obj
    rows = [describe(run) for run in home.runs()]
    emit(
        "RunList",
        rows,
        output=output,
        columns=columns_of("name", "state", "attempt", "step", "steps:of", "loss", "pid:served by", "message:why"),
    )


def show(context: typer.Context, name: NameArgument, output: OutputOption = Format.TABLE) -> None:
    """Show one run: status, attempts, checkpoints and files.

    Example: polyreme runs show quickstart
    """
    run = find(context.obj, name)
    row = describe(run)
    records = read_records_at(checkpoint_url(run, read_job(run.job_file)))
    row["attempts"] = [
        {"attempt": point.attempt, "resumedFrom": point.resume_from, "steps": len(records.steps.get(point.attempt, ()))}
        for point in records.points
    ]
    row["checkpoints"] = [
        {"name": entry.name, "committed": entry.committed, "history": entry.history} for entry in records.checkpoints
    ]
    row["status"] = (read_json(run.state_file) or {}).get("status", {})
    emit(
        "Run",
        row if output is Format.JSON else {**row, **_lines(row)},
        output=output,
        columns=[
            ("name", "name"),
            ("state", "state"),
            ("why", "message"),
            ("attempt", "attempt"),
            ("step", "step"),
            ("of", "steps"),
            ("loss", "loss"),
            ("attempts", "attemptLine"),
            ("checkpoints", "checkpointLine"),
            ("served by", "pid"),
            ("folder", "folder"),
            ("report", "report"),
        ],
    )


def logs(
    context: typer.Context,
    name: NameArgument,
    rank: Annotated[int | None, typer.Option(help="Only this rank.")] = None,
    attempt: Annotated[int | None, typer.Option(help="Only this attempt.")] = None,
    host: Annotated[bool, typer.Option("--host", help="Show the operator's and the kubelet's log instead.")] = False,
    steps: Annotated[bool, typer.Option("--steps", help="Show the loss of each step instead.")] = False,
    stacks: Annotated[
        bool, typer.Option("--stacks", help="Show where ranks were when they made no progress, equal stacks together.")
    ] = False,
    following: Annotated[
        bool, typer.Option("-f", "--follow", help="Stream new lines of all ranks as they are written, until it ends.")
    ] = False,
    lines: Annotated[
        int, typer.Option("--tail", "-n", min=1, max=LOG_LINES_MAX, help="Number of last lines to show of each file.")
    ] = 50,
    output: OutputOption = Format.TABLE,
) -> None:
    """Print the last lines of a run's logs, by rank and attempt, or the loss of its last steps.

    Examples:

      polyreme runs logs quickstart --rank 1 --attempt 2

      polyreme runs logs quickstart -f

      polyreme runs logs quickstart --steps --tail 20

      polyreme runs logs quickstart --host

      polyreme runs logs quickstart --stacks
    """
    run = find(context.obj, name)
    if following:
        if steps or host or stacks or output is Format.JSON:
            raise InvalidConfigError(
                "only lines of ranks are followed; drop --follow, or --steps, --host, --stacks and -o json"
            )
        run_logs.follow(run, _print_now, rank=rank, attempt=attempt, tail=lines, sleep=time.sleep)
        return
    if steps:
        _emit_steps(run, attempt, lines, output)
        return
    if stacks:
        _emit_stacks(run, attempt, output)
        return
    if host:
        texts = {path.name: run_logs.last_lines(path, lines) for path in (run.host_log, run.data_log) if path.exists()}
    else:
        files = run_logs.rank_files(run, rank=rank, attempt=attempt)
        texts = {str(path.relative_to(run.path)): run_logs.last_lines(path, lines) for _, path in files}
        texts = texts or _stored_lines(run, rank, attempt, lines)
    if not texts:
        raise NotFoundError(f"run {name!r} has no log yet", field="--host")
    if output is Format.JSON:
        emit("LogList", [{"file": file, "lines": text} for file, text in texts.items()], output=output)
        return
    for file, text in texts.items():
        sys.stdout.write("\n".join([f"==> {file} <==", *text]) + "\n")


def _stored_lines(run: RunDirectory, rank: int | None, attempt: int | None, lines: int) -> dict[str, list[str]]:
    """Return what is stored of an attempt whose files are gone, by key.

    Raises:
        NotFoundError: If nothing is, naming the ranks and attempts that have lines.
    """
    there = [log for log, _ in run_logs.rank_files(run)]
    known = (
        f"ranks 0 to {max(log.rank for log in there)} have lines in attempts {_span(there)}" if there else "no rank has"
    )
    missing = NotFoundError(
        f"run {run.name!r} has no such log: rank {rank}, attempt {attempt}; {known}", field="--rank or --attempt"
    )
    try:
        stored = stored_logs(checkpoint_url(run, read_job(run.job_file)), rank=rank, attempt=attempt)
    except NotFoundError:
        raise missing from None
    chosen = stored.chosen(rank=rank, attempt=attempt)
    if not chosen:
        raise missing
    return {log.stored_key: stored.lines(log, lines) for log in chosen}


def _emit_stacks(run: RunDirectory, attempt: int | None, output: Format) -> None:
    """Print the stacks of the newest attempt that has some.

    Raises:
        NotFoundError: If no attempt has.
    """
    groups = run_stacks.group(run_stacks.of_pods(run, attempt))
    if not groups:
        stored = stored_logs(checkpoint_url(run, read_job(run.job_file)), attempt=attempt)
        groups = run_stacks.group(run_stacks.of_store(stored.store, attempt))
    if not groups:
        raise NotFoundError(f"no rank of run {run.name!r} has written stacks: none made no progress", field="--attempt")
    if output is Format.JSON:
        emit("StackList", [dataclasses.asdict(each) for each in groups], output=output)
        return
    for each in groups:
        ranks = ", ".join(map(str, each.ranks))
        lines = each.lines or ["  wrote none: stopped, or ended before"]
        sys.stdout.write("\n".join([f"==> attempt {each.attempt}, rank {ranks} <==", *lines]) + "\n")


def _span(logs: Sequence[RankAttempt]) -> str:
    attempts = [log.attempt for log in logs]
    return f"{min(attempts)} to {max(attempts)}"


def _print_now(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


def _emit_steps(run: RunDirectory, attempt: int | None, lines: int, output: Format) -> None:
    """Print the newest steps, of one attempt or of the committed history."""
    records = read_records_at(checkpoint_url(run, read_job(run.job_file)))
    trained = records.history if attempt is None else records.steps.get(attempt, ())
    if not trained:
        raise NotFoundError(f"no step of run {run.name!r} is recorded", field="--attempt")
    rows = [
        {
            "step": record.step,
            "attempt": record.attempt,
            "loss": record.loss,
            "gradientNorm": record.gradient_norm,
            "learningRate": record.learning_rate,
            "tokens": record.tokens,
            "stepSeconds": round(record.step_s, 4),
        }
        for record in trained[-lines:]
    ]
    names = ("step", "attempt", "loss", "gradientNorm:gradient", "learningRate:rate", "tokens", "stepSeconds:seconds")
    emit("StepList", rows, output=output, columns=columns_of(*names))


def stop(
    context: typer.Context,
    name: NameArgument,
    timeout_s: Annotated[int, typer.Option("--timeout", min=1, max=3600, help="Longest wait in seconds.")] = 120,
    output: OutputOption = Format.TABLE,
) -> None:
    """Save a checkpoint and stop a run; polyreme run with the same file continues it.

    Example: polyreme runs stop quickstart
    """
    run = find(context.obj, name)
    host = (read_identity(run) or {}).get("host", {})
    if not run_logs.is_served(run):
        raise RefusedError(f"run {name!r} is not being served, so there is nothing to stop")
    # Not SIGINT: a shell has commands that it starts in the background ignore that.
    os.kill(int(host["pid"]), signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    while is_same_process(host.get("pid"), host.get("processStartedAt")):
        if time.monotonic() > deadline_s:
            raise WaitTimeoutError(f"run {name!r} has not stopped within {timeout_s} s", field="--timeout")
        time.sleep(STOP_POLL_S)
    note(f"run {name} is stopped; {CONTINUES}")
    if output is Format.JSON:
        emit("Run", describe(run), output=output)


def rm(
    context: typer.Context,
    name: NameArgument,
    checkpoints: Annotated[
        bool,
        typer.Option(
            "--checkpoints", help="Delete its checkpoints too, unless they are in a bucket or another folder."
        ),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")] = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Delete the logs, report and export of a run that is not running. Its checkpoints stay without --checkpoints.

    Examples:

      polyreme runs rm quickstart

      polyreme runs rm quickstart --checkpoints --yes
    """
    run = find(context.obj, name)
    folders = [run.path, *([run.checkpoints] if checkpoints else [])]
    folders += [path for folder in folders if (path := folder.with_name(folder.name + PREVIOUS_SUFFIX)).exists()]
    present = [folder for folder in folders if folder.exists()]
    with serving(run):
        size_bytes = sum(file.stat().st_size for folder in present for file in folder.rglob("*") if file.is_file())
        confirm(f"delete {', '.join(map(str, present))} ({size(size_bytes)})?", yes=yes)
        release_run(context.obj, run)
        for folder in present:
            shutil.rmtree(folder)
    deleted = [str(folder) for folder in present]
    row = {"name": name, "deleted": deleted, "bytes": size_bytes}
    words = {"deletedWords": ", ".join(deleted), "freed": size(size_bytes)}
    emit(
        "DeletedRun",
        row if output is Format.JSON else row | words,
        output=output,
        columns=[("run", "name"), ("deleted", "deletedWords"), ("freed", "freed")],
    )


def find(home: Home, name: str, *, field: str = "NAME") -> RunDirectory:
    """Look a run up by name or namespace/name; ``field`` is what an error tells to change.

    Raises:
        NotFoundError: If there is none, naming those that exist.
    """
    namespace, _, short = name.rpartition("/")
    run = home.run(namespace or "default", short)
    if run.exists:
        return run
    known = [other.name if other.namespace == "default" else f"{other.namespace}/{other.name}" for other in home.runs()]
    raise NotFoundError(f"no run {name!r} under {home.path}: {nearest(name, known)}", field=field)


def _lines(row: dict[str, Any]) -> dict[str, str]:
    attempts = ", ".join(
        f"{entry['attempt']} from {entry['resumedFrom'] or 'the beginning'}" for entry in row["attempts"]
    )
    checkpoints = ", ".join(entry["name"] + ("" if entry["committed"] else " (torn)") for entry in row["checkpoints"])
    return {"attemptLine": attempts or "-", "checkpointLine": checkpoints or "-"}
