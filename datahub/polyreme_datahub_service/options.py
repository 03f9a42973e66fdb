"""Command line of ``polyreme-datahub``; every option can be given by an environment variable, too."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from polyreme_cluster.arguments import Arguments, level
from polyreme_cluster.logging_setup import LogFormat
from polyreme_datahub.recipes.files import job_operations
from polyreme_datahub_service.controller import JOBS_MAX
from polyreme_datahub_service.home import DataHome

OPERATIONS = ",".join(job_operations())
"""Of a job's data: each may be the last one of a chain."""
VARIABLE_PREFIX = "POLYREME_DATAHUB_"
JOBS_MOST = 64
WORKERS_MOST = 1_000
THREADS_MOST = 256


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkerOptions:
    """Deployments of workers in the service's own namespace."""

    deployment: str
    operations: tuple[str, ...]
    most: int
    gpu_most: int
    """0: there is no Deployment of workers with a GPU."""
    threads: int
    """Of each worker."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How the command was called."""

    home: DataHome
    namespace: str
    """Where the Lease lies."""
    jobs_namespace: str | None
    """Whose jobs; None: all."""
    jobs_max: int
    workers: WorkerOptions | None
    """Pods that do the work; None: this process does it."""
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
        home=DataHome.locate(given.home),
        namespace=given.namespace,
        jobs_namespace=given.jobs_namespace or None,
        jobs_max=given.jobs_max,
        workers=_workers(given),
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
        type=_count_to(JOBS_MOST),
        default=given("JOBS_MAX", str(JOBS_MAX)),
        help=f"jobs whose data is prepared at once, at most {JOBS_MOST}",
    )
    parser.add_argument(
        "--home", type=Path, default=None, help="folder of logs and of embedded stores (default: POLYREME_HOME)"
    )
    _add_workers(arguments)
    arguments.add_metrics_address()
    arguments.add_logging()
    return parser


def _add_workers(arguments: Arguments) -> None:
    """Add what says who does the work."""
    parser, given = arguments.parser, arguments.given
    parser.add_argument(
        "--workers-deployment",
        metavar="NAME",
        default=given("WORKERS_DEPLOYMENT", ""),
        help="Deployment of `polyreme data worker` in this namespace: its pods do the work, as many as the backlog "
        "asks for, none while nothing waits; this process plans, waits and seals. Needs POLYREME_TOPICS_URL. Default: "
        "this process does the work",
    )
    parser.add_argument(
        "--workers-operations",
        metavar="NAMES",
        type=_names,
        default=given("WORKERS_OPERATIONS", OPERATIONS),
        help=f"operations that these pods work on, as their own --operations says (default: {OPERATIONS})",
    )
    parser.add_argument(
        "--workers-max",
        type=_count_to(WORKERS_MOST),
        default=given("WORKERS_MAX", "8"),
        help=f"pods of the Deployment, at most {WORKERS_MOST}",
    )
    parser.add_argument(
        "--gpu-workers-max",
        type=_count_to(WORKERS_MOST, least=0),
        default=given("GPU_WORKERS_MAX", "0"),
        help="the same for the Deployment NAME-gpu, which does operations that need a GPU; 0: there is none",
    )
    parser.add_argument(
        "--worker-threads",
        type=_count_to(THREADS_MOST),
        default=given("WORKER_THREADS", "2"),
        help="items that one pod does at once, as its own --workers says",
    )


def _workers(given: argparse.Namespace) -> WorkerOptions | None:
    if not given.workers_deployment:
        return None
    return WorkerOptions(
        deployment=given.workers_deployment,
        operations=given.workers_operations,
        most=given.workers_max,
        gpu_most=given.gpu_workers_max,
        threads=given.worker_threads,
    )


def _names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    if not names:
        raise argparse.ArgumentTypeError(f"no operation is named: {text!r}")
    return names


def _count_to(most: int, *, least: int = 1) -> Callable[[str], int]:
    def read(text: str) -> int:
        if not text.isascii() or not text.isdigit() or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"not a count: {text!r}, expected {least} to {most}")
        return int(text)

    return read
