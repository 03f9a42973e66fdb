"""The operator's command line; every option can be given by a variable of the environment, too."""

from __future__ import annotations

import argparse
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import get_args

from polyreme_api.urls import has_password
from polyreme_cluster.arguments import LOOPBACK, Arguments, level
from polyreme_cluster.logging_setup import LogFormat
from polyreme_operator.reconcile.binding import BindingMode
from polyreme_operator.reconcile.ca_bundle import CaBundle
from polyreme_operator.reconcile.worker_pods import PodDefaults
from polyreme_operator.scheduler import Limits
from polyreme_operator.settings import Settings

VARIABLE_PREFIX = "POLYREME_OPERATOR_"
SECONDS_MAX = 86_400.0
_CREDENTIALS = frozenset({"AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "PGPASSWORD", "POLYREME_TOPICS_TOKEN"})
"""Variables that are themselves secrets."""
_OBJECT_NAME = re.compile(r"[a-z0-9]([a-z0-9.-]{0,251}[a-z0-9])?")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What an installation says."""

    settings: Settings
    host: str
    """Address of the metrics and probes; empty is every one."""
    port: int
    log_format: LogFormat
    log_level: int
    webhook_secret: Path | None
    """Folder of the Secret that says where alerts are sent; None: nowhere."""
    runbook_url: str
    """Start of the links of alerts."""

    @property
    def is_local(self) -> bool:
        """Whether only this machine reaches the metrics."""
        return self.host in LOOPBACK


def parse(arguments: Sequence[str], environment: Mapping[str, str]) -> Options:
    """Read the command line; argparse ends the process with 2 where it is wrong."""
    given = _arguments(environment).parse_args(arguments)
    host, port = given.metrics_address
    defaults = PodDefaults(
        image=given.image,
        api_url=given.api_url,
        checkpoint_root=given.checkpoint_root,
        environment=tuple(given.environment),
        worker_secret=given.worker_secret,
        pull_secrets=tuple(given.worker_pull_secret),
        ca_bundle=given.worker_ca_file,
        binding=given.binding,
        launcher_rbac=given.launcher_rbac,
    )
    return Options(
        settings=Settings(
            namespace=given.namespace,
            defaults=defaults,
            limits=Limits(grow_cooldown_s=given.grow_cooldown_seconds),
            default_unlimited=given.missing_default_queue == "Unlimited",
            data_gate=given.data_gate,
            node_health=given.node_health,
            repairs=given.repairs,
            repairs_namespace=given.repairs_namespace or given.namespace,
        ),
        host=host,
        port=port,
        log_format=LogFormat(given.log_format),
        log_level=level(given.log_level),
        webhook_secret=Path(given.webhook_secret) if given.webhook_secret else None,
        runbook_url=given.runbook_url,
    )


def _arguments(environment: Mapping[str, str]) -> argparse.ArgumentParser:
    arguments = Arguments(
        "polyreme-operator",
        "Run TrainingJobs on the cluster of KUBECONFIG, or on the cluster that this process is a pod of.",
        prefix=VARIABLE_PREFIX,
        environment=environment,
    )
    arguments.add_namespace("namespace of the leader Lease and the intents")
    _add_workers(arguments)
    parser, given = arguments.parser, arguments.given
    parser.add_argument(
        "--grow-cooldown-seconds",
        metavar="SECONDS",
        type=_seconds,
        default=given("GROW_COOLDOWN_SECONDS", f"{Limits().grow_cooldown_s:g}"),
        help="shortest time that an elastic job runs before it is stopped to continue with more workers",
    )
    parser.add_argument(
        "--missing-default-queue",
        choices=["Unlimited", "Refuse"],
        default=given("MISSING_DEFAULT_QUEUE", "Unlimited"),
        help="what jobs find that name no queue while there is no TrainingQueue default: no limit, or a queue that is "
        "missing, in which they wait",
    )
    parser.add_argument(
        "--data-gate",
        action=argparse.BooleanOptionalAction,
        default=given("DATA_GATE", "false") == "true",
        help="admit a job only when its data is ready, which polyreme-datahub or polyreme node reports; without one of "
        "them, jobs would wait forever",
    )
    parser.add_argument(
        "--node-health",
        action=argparse.BooleanOptionalAction,
        default=given("NODE_HEALTH", "true") == "true",
        help="carry out NodeFaultPolicies; without any, nothing is done to nodes",
    )
    parser.add_argument(
        "--repairs",
        action=argparse.BooleanOptionalAction,
        default=given("REPAIRS", "false") == "true",
        help="run the hooks of NodeFaultPolicies as Jobs, and evict other pods of nodes to be repaired",
    )
    parser.add_argument(
        "--repairs-namespace",
        default=given("REPAIRS_NAMESPACE", ""),
        help="namespace of the hooks' PodTemplates and Jobs; empty: the operator's own",
    )
    parser.add_argument(
        "--webhook-secret",
        metavar="FOLDER",
        default=given("WEBHOOK_SECRET", ""),
        help="folder of a mounted Secret: its file url says where alerts are sent (https), its file key signs them; "
        "empty: nowhere",
    )
    parser.add_argument(
        "--runbook-url",
        metavar="URL",
        default=given("RUNBOOK_URL", "docs/runbooks/alerts.md"),
        help="start of the links of alerts; the alert's name follows after #",
    )
    arguments.add_metrics_address()
    arguments.add_logging()
    return parser


def _add_workers(arguments: Arguments) -> None:
    """Add what worker pods get."""
    defaults = PodDefaults()
    parser, given = arguments.parser, arguments.given
    modes = [mode for mode in get_args(BindingMode) if mode != "NodeName"]
    parser.add_argument(
        "--binding",
        choices=modes,
        default=given("BINDING", "NodeAffinity"),
        help="who binds pods: kube-scheduler (NodeAffinity), or the operator itself, on nodes with the taint "
        "polyreme.dev/owned (GangBinder)",
    )
    parser.add_argument("--image", default=given("IMAGE", defaults.image), help="image of workers whose job names none")
    parser.add_argument("--api-url", default=given("API_URL", defaults.api_url), help="API server as pods reach it")
    parser.add_argument(
        "--checkpoint-root",
        default=given("CHECKPOINT_ROOT", defaults.checkpoint_root),
        help="URL for the checkpoints of jobs that name no location",
    )
    parser.add_argument(
        "--environment",
        metavar="NAME=VALUE",
        type=_variable,
        action="append",
        default=_variables(arguments, given("ENVIRONMENT", "")),
        help="environment variable of every worker, such as the object store's URL; may be repeated. Every pod's spec "
        "shows it, so a URL with a password is refused: see --worker-secret",
    )
    parser.add_argument(
        "--worker-secret",
        metavar="NAME",
        type=_object_name,
        default=given("WORKER_SECRET", "") or None,
        help="Secret in each job's namespace whose keys become environment variables of its workers, such as "
        "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY; a job whose namespace lacks it waits and says so",
    )
    parser.add_argument(
        "--worker-pull-secret",
        metavar="NAME",
        type=_object_name,
        action="append",
        default=_names(arguments, given("WORKER_PULL_SECRET", "")),
        help="Secret in each job's namespace by which --image is pulled; may be repeated",
    )
    parser.add_argument(
        "--worker-ca-file",
        metavar="PATH",
        type=_ca_bundle,
        default=given("WORKER_CA_FILE", "") or None,
        help="PEM file with the authorities that workers trust instead of the public ones; it is read at start, and "
        "given to each job as a Secret",
    )
    parser.add_argument(
        "--launcher-rbac",
        action=argparse.BooleanOptionalAction,
        default=given("LAUNCHER_RBAC", "true") == "true",
        help="give each job a Role for its launcher",
    )


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = -1.0
    if not 0 <= seconds <= SECONDS_MAX:
        raise argparse.ArgumentTypeError(f"not a time: {text!r}, expected 0 to {SECONDS_MAX:g} seconds")
    return seconds


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"not a variable: {name!r}, expected NAME=VALUE")
    if name in _CREDENTIALS:
        raise argparse.ArgumentTypeError(
            f"{name} is a secret, which every pod's spec would show; put it into a Secret that --worker-secret names"
        )
    if has_password(value):
        raise argparse.ArgumentTypeError(
            f"{name} holds a password inside a URL, which every pod's spec would show; remove it, and put the "
            "credentials into a Secret that --worker-secret names (for a database: PGUSER and PGPASSWORD)"
        )
    return name, value


def _variables(arguments: Arguments, text: str) -> list[tuple[str, str]]:
    """Read the variables that the environment gives; a wrong one ends the process as a wrong argument does."""
    try:
        return [_variable(pair) for pair in text.split()]
    except argparse.ArgumentTypeError as error:
        arguments.refuse("ENVIRONMENT", str(error))


def _names(arguments: Arguments, text: str) -> list[str]:
    try:
        return [_object_name(name) for name in text.split()]
    except argparse.ArgumentTypeError as error:
        arguments.refuse("WORKER_PULL_SECRET", str(error))


def _ca_bundle(text: str) -> CaBundle:
    try:
        return CaBundle(Path(text).read_text(encoding="utf-8"))
    except OSError as error:
        raise argparse.ArgumentTypeError(f"can't be read: {text}: {error.strerror}") from error
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _object_name(text: str) -> str:
    if not _OBJECT_NAME.fullmatch(text):
        raise argparse.ArgumentTypeError(f"not a Secret's name: {text!r}, expected lower-case letters, digits, - and .")
    return text
