"""``polyreme sweep``."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated

import typer

from polyreme.commands.job_arguments import JobFiles
from polyreme.local_run.signals import cancel_on_signals
from polyreme.run_files.paths import Home
from polyreme.views.output import Format, ManifestFormat, emit, note, print_manifests
from polyreme_api.errors import InvalidConfigError
from polyreme_api.exit_codes import ExitCode

if TYPE_CHECKING:
    from polyreme.local_run.sweep_jobs import SweepJob


def sweep(
    context: typer.Context,
    job: JobFiles,
    settings: Annotated[
        list[str],
        typer.Option(
            "--set",
            metavar="PATH=VALUE,...",
            help="A field below spec and its values, separated by commas; of several options each value is combined "
            "with each. One value is common to all jobs.",
        ),
    ],
    at_once: Annotated[
        int | None,
        typer.Option(
            min=1, max=64, help="Most jobs that run at the same time.", show_default="one for as many cores as ranks"
        ),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(help="Name of the sweep, with which names of jobs begin.", show_default="the job's"),
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Only check the jobs and list their names and values.")
    ] = False,
    output: Annotated[
        ManifestFormat,
        typer.Option("-o", "--output", help="Output format; yaml: the manifests of the jobs, with --dry-run."),
    ] = ManifestFormat.TABLE,
) -> int:
    """Train a job with several values of some fields, one run for each combination, and compare the runs.

    At most 100 jobs. Each is a run of its own, named after its values and labelled polyreme.dev/sweep; a job that fails
    stops no other. Run the same command again to continue: runs that have succeeded are not repeated. Ctrl-C saves a
    checkpoint of each running job and stops. Exit codes: 0 if all succeeded, 6 stopped, 2, 3 or 4 refused before
    anything started, else that of the failed jobs, or 100 if they differ.

    Examples:

      polyreme sweep job.yaml --set training.optimizer.learningRate=1e-3,3e-4

      polyreme sweep job.yaml --set training.seed=1,2 --set training.steps=200 --name seeds --at-once 2

      polyreme sweep base.yaml mine.yaml --set training.seed=1,2,3 --dry-run

      polyreme sweep job.yaml --set training.seed=1,2,3 --dry-run -o yaml | kubectl create -f -
    """
    # Before the modules of a run are imported: Ctrl-C meanwhile must end the command as it does later.
    cancel_on_signals()
    from polyreme.commands.runs_compare import show_comparison
    from polyreme.job_overrides import read_manifest
    from polyreme.local_run import sweep_jobs
    from polyreme.local_run.sweep import Sweep

    home: Home = context.obj
    if output is ManifestFormat.YAML and not dry_run:
        raise InvalidConfigError("-o yaml prints jobs and runs none; add --dry-run", field="-o")
    jobs = sweep_jobs.sweep_jobs(read_manifest(job), settings, name=name)
    limit = at_once or sweep_jobs.at_once(jobs)
    if dry_run:
        return _show(jobs, output)
    todo = sweep_jobs.check_jobs(home, jobs)
    note(f"{len(jobs)} jobs, {len(jobs) - len(todo)} have succeeded before; at most {limit} at the same time")
    code = Sweep(home, at_once=limit).run(todo, done=len(jobs) - len(todo))
    if runs := [run for each in jobs if (run := each.run(home)).exists]:
        show_comparison(runs, Format(output))
    if code is ExitCode.CANCELLED:
        note("stopped; the same command continues the sweep")
    return code


def _show(jobs: Sequence[SweepJob], output: ManifestFormat) -> int:
    if output is ManifestFormat.YAML:
        print_manifests([each.manifest for each in jobs])
        return ExitCode.OK
    rows = [
        {"name": each.name} | {setting.field.removeprefix("spec."): setting.text for setting in each.values}
        for each in jobs
    ]
    emit("SweepJobs", rows, output=Format(output), columns=[(field, field) for field in rows[0]])
    return ExitCode.OK
