"""``kubectl-polyreme``, which kubectl finds on PATH and runs as ``kubectl polyreme``."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import typer

from polyreme.cli_errors import invoke as run_app
from polyreme.lazy_commands import Declared, commands, group_of

HELP = """Show and change the training jobs of a cluster.

Examples:

  kubectl polyreme get                   list jobs: state and reason

  kubectl polyreme why big               what a job waits for, and what would let it run

  kubectl polyreme queue                 quota, what is used and borrowed, and waiting jobs

  kubectl polyreme topology              devices by domain, and the jobs that run there

  kubectl polyreme top                   step, speed and goodput of running jobs

  kubectl polyreme usage                 where the device time went, by queue, label, node or day

  kubectl polyreme logs big -f           lines of all ranks as they are written, over restarts

  kubectl polyreme nodes                 nodes that are out of service, why, and what would bring them back

  kubectl polyreme incidents             when nodes were out of service, and what it cost

  kubectl polyreme console               all of this in a browser, and a form that submits jobs

Exit codes: 0 success, 1 internal error, 2 usage, 3 not found, 4 refused by the state, the operator or the API server,
5 timed out, 6 stopped on request, 7 the cluster does not answer or no operator works on it, 100 the job failed.
"""
NAME = "kubectl polyreme"
ANYWHERE = ("-n", "--namespace", "--context", "--kubeconfig")
"""Options that may stand before the verb, too; each takes a value."""

COMMANDS: tuple[Declared, ...] = (
    *commands("polyreme.plugin.commands.show", "get", "describe", "why", "queue", "topology", "top"),
    *commands("polyreme.plugin.commands.usage", "usage"),
    *commands("polyreme.plugin.commands.logs", "logs"),
    *commands("polyreme.plugin.commands.nodes", "nodes"),
    *commands("polyreme.plugin.commands.incidents", "incidents", "incident"),
    *commands("polyreme.plugin.commands.nodes", "quarantine", "release"),
    *commands("polyreme.plugin.commands.change", "suspend", "resume", "scale", "cancel"),
    *commands("polyreme.plugin.commands.console", "console"),
)
app = typer.Typer(
    name=NAME,
    cls=group_of(COMMANDS),
    help=HELP,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
)


@app.callback()
def _group() -> None:
    """Make the commands a group."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line and exit with a code of ``ExitCode``."""
    sys.exit(invoke(arguments))


def invoke(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code."""
    return run_app(app, verb_first(sys.argv[1:] if arguments is None else arguments), name=NAME)


def verb_first(arguments: Sequence[str]) -> list[str]:
    """Put options that stand before the verb after it, as kubectl takes its own at either place; without one, none."""
    at = 0
    while at < len(arguments) and arguments[at].partition("=")[0] in ANYWHERE:
        at += 1 if "=" in arguments[at] else 2
    return [arguments[at], *arguments[:at], *arguments[at + 1 :]] if at < len(arguments) else []
