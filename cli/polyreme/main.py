"""The ``polyreme`` command: parses, calls, and turns every error into one message and a documented exit code."""

from __future__ import annotations

import importlib.metadata
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyreme import cli_errors
from polyreme.lazy_commands import Command, Declared, Group, commands, group_of
from polyreme.run_files.paths import Home
from polyreme_api.exit_codes import ExitCode

HELP = """Train mixture-of-experts vision-language models: one TrainingJob, here or on a cluster.

Examples:

  polyreme run job.yaml                 train here; run again to continue

  polyreme validate job.yaml            check a job and show its plan

  polyreme plan job.yaml                search the best layout

  polyreme sweep job.yaml --set training.seed=1,2

  polyreme profile job.yaml             where the time of a step goes

  polyreme data register pages ./pages  register your own data

  polyreme ask NAME --image page.png "..."  ask the trained model

  polyreme runs ls                      list the runs on this machine

Exit codes: 0 success, 1 internal error, 2 usage or refused spec, 3 not found, 4 refused by the state, 5 timed out,
6 stopped on request, 7 environment (disk, store, port), 8 training data damaged, 100 the run failed.
"""

COMMANDS: tuple[Declared, ...] = (
    Command("polyreme.commands.run", "run"),
    Command("polyreme.commands.validate", "validate"),
    Command("polyreme.commands.plan", "plan"),
    Command("polyreme.commands.profile", "profile"),
    Command("polyreme.commands.sweep", "sweep"),
    Command("polyreme.commands.sim", "sim"),
    Command("polyreme.commands.node", "node"),
    Command("polyreme.commands.ask", "ask"),
    Command("polyreme.commands.serve", "serve"),
    Command("polyreme.commands.console", "console"),
    *commands("polyreme.commands.machine", "doctor", "version"),
    Group(
        "runs",
        "Runs on this machine.",
        (
            *commands("polyreme.commands.runs", "ls", "show", "logs", "stop", "rm"),
            Command("polyreme.commands.runs_compare", "compare"),
            Command("polyreme.commands.runs_export", "export"),
            Command("polyreme.commands.runs_answers", "answers"),
        ),
    ),
    Group(
        "data",
        "Datasets: register, ingest, list, show, compare, derive, repair, delete.",
        (
            Command("polyreme.commands.data_ingest", "ingest"),
            Command("polyreme.commands.data_worker", "worker"),
            *commands("polyreme.commands.data_care", "replay", "gc", "rebuild-registry", "link"),
            *commands("polyreme.commands.data_versions", "tag", "diff", "subset", "split", "lineage", "stats"),
            *commands("polyreme.commands.data_preview", "preview", "trace", "mixture"),
            *commands("polyreme.commands.data", "register", "ls", "show", "rm"),
        ),
    ),
    Group(
        "checkpoint",
        "Checkpoints of runs, in a local folder or in a bucket.",
        (
            *commands("polyreme.commands.checkpoint", "ls", "verify", "export", "average"),
            Command("polyreme.commands.checkpoint_server", "check-server"),
        ),
    ),
)
app = typer.Typer(
    name="polyreme",
    cls=group_of(COMMANDS),
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=True,
)


def _print_version(wanted: bool) -> None:
    if wanted:
        sys.stdout.write(f"polyreme {importlib.metadata.version('polyreme')}\n")
        raise typer.Exit(ExitCode.OK)


@app.callback()
def _locate_home(
    context: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of runs and data.", envvar="POLYREME_HOME", show_default="~/.local/share/polyreme"),
    ] = None,
    version: Annotated[  # noqa: ARG001 - its callback prints
        bool, typer.Option("--version", help="Print the version and exit.", is_eager=True, callback=_print_version)
    ] = False,
) -> None:
    context.obj = Home.locate(given=home)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of ``ExitCode``."""
    sys.exit(invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return cli_errors.invoke(app, arguments, name="polyreme")


if __name__ == "__main__":
    main()
