"""Command line of ``polyreme-datahub``; every option can be given by an environment variable, too."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path

from polyreme.data.controller import JOBS_MAX
from polyreme.paths import Home
from polyreme_operator.arguments import Arguments, level
from polyreme_operator.logging_setup import LogFormat

VARIABLE_PREFIX = "POLYREME_DATAHUB_"
JOBS_MOST = 64


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the command was called."""

    home: Home
    namespace: str
    """Where the Lease lies."""
    jobs_namespace: str | None
    """Whose jobs; None: all."""
    jobs_max: int
    host: str
    """Address of the metrics and probes; empty is every one."""
    port: int
    log_format: LogFormat
    log_level: int


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read the command line; argparse ends the process with 2 where it is wrong.

    Raises:
        InvalidConfigError: If the home is a file.
    """
    given = _arguments(environment).parse_args(arguments)
    return Options(
        home=Home.locate(given.home),
        namespace=given.namespace,
        jobs_namespace=given.jobs_namespace or None,
        jobs_max=given.jobs_max,
        host=given.metrics_address[0],
        port=given.metrics_address[1],
        log_format=LogFormat(given.log_format),
        log_level=level(given.log_level),
    )


def _arguments(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    arguments = Arguments(
        "polyreme-datahub",
        "Prepare the data of TrainingJobs on the cluster of KUBECONFIG, or on the cluster that this process is a pod "
        "of, and report on it: jobs then wait for their data in the queue, if the operator runs with --data-gate. The "
        "registry and the object store are those of POLYREME_DATABASE_URL and POLYREME_OBJECTS_URL, or lie in the "
        "home.",
        prefix=VARIABLE_PREFIX,
        environment=environment,
    )
    arguments.add_namespace("namespace of the leader Lease")
    parser, given = arguments.parser, arguments.given
    parser.add_argument(
        "--jobs-namespace",
        default=given("JOBS_NAMESPACE", ""),
        help="prepare the data of this namespace's jobs only; default: all",
    )
    parser.add_argument(
        "--jobs-max",
        type=_count,
        default=given("JOBS_MAX", str(JOBS_MAX)),
        help=f"jobs whose data is prepared at once, at most {JOBS_MOST}",
    )
    parser.add_argument(
        "--home", type=Path, default=None, help="folder of logs and of embedded stores (default: POLYREME_HOME)"
    )
    arguments.add_metrics_address()
    arguments.add_logging()
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= JOBS_MOST:
        raise argparse.ArgumentTypeError(f"not a count: {text!r}, expected 1 to {JOBS_MOST}")
    return int(text)
