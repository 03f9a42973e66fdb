"""The ``polyreme`` command: parses, calls, and turns every error into one message and a documented exit code."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from polyreme import ending
from polyreme.commands import checkpoint, data, machine, node, plan, profile, run, runs

HELP = """Train mixture-of-experts vision-language models: one TrainingJob, here or on a cluster.

Examples:

  polyreme run job.yaml                 train on this machine; the same again goes on where it stood

  polyreme validate job.yaml            check a job and show its plan; starts nothing

  polyreme plan job.yaml                search the layout for a job's workers, and draw its schedule

  polyreme profile job.yaml             run a few steps: where their time goes, by layer and exchange

  polyreme data register pages ./pages  register your own images and conversations

  polyreme runs ls                      runs on this machine, and what each waits for

Exit codes: 0 success, 1 internal error, 2 usage or refused spec, 3 not found, 4 refused by the state, 5 timed out,
6 stopped on request, 7 environment (disk, store, port), 100 the run failed.
"""

app = typer.Typer(name="polyreme", help=HELP, no_args_is_help=True, pretty_exceptions_enable=False, add_completion=True)
app.command(name="run")(run.run)
app.command(name="validate")(run.validate)
app.command(name="plan")(plan.plan)
app.command(name="profile")(profile.profile)
app.command(name="node")(node.node)
app.command(name="doctor")(machine.doctor)
app.command(name="version")(machine.version)
app.add_typer(runs.app, name="runs")
app.add_typer(data.app, name="data")
app.add_typer(checkpoint.app, name="checkpoint")


@app.callback()
def _locate_home(
    context: typer.Context,
    home: Annotated[
        Path | None,
        typer.Option(help="Folder of runs and data.", envvar="POLYREME_HOME", show_default="~/.local/share/polyreme"),
    ] = None,
) -> None:
    from polyreme.home import Home

    context.obj = Home.locate(given=home)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of ``ExitCode``."""
    sys.exit(invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return ending.invoke(app, arguments, name="polyreme")


if __name__ == "__main__":
    main()
