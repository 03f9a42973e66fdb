"""Options that the services of an installation have in common: each can be set by an environment variable, too."""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from polyreme_cluster.logging_setup import LogFormat
from polyreme_system.addresses import split_address

NAMESPACE_FILE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")
DEFAULT_NAMESPACE = "polyreme-system"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
_LEVELS = ("debug", "info", "warning", "error")


class Arguments:
    """A parser whose defaults come from the environment.

    Args:
        program: Name of the command.
        description: What it does.
        prefix: Prefix of its variables.
        environment: The environment.
    """

    def __init__(self, program: str, description: str, *, prefix: str, environment: Mapping[str, str]) -> None:
        self._prefix, self._environment = prefix, environment
        self.parser = argparse.ArgumentParser(
            prog=program,
            description=description,
            epilog=f"Each option can be set by a variable: {prefix}NAMESPACE for --namespace, and so on.",
            allow_abbrev=False,
        )

    def given(self, name: str, default: str) -> str:
        """Return the value of a variable."""
        return self._environment.get(self._prefix + name, default)

    def refuse(self, name: str, words: str) -> NoReturn:
        """End the process as for a wrong argument: a variable has a wrong value."""
        self.parser.error(f"{self._prefix}{name}: {words}")

    def add_namespace(self, text: str) -> None:
        """Add ``--namespace``."""
        self.parser.add_argument("--namespace", default=self.given("NAMESPACE", _own_namespace()), help=text)

    def add_metrics_address(self) -> None:
        """Add ``--metrics-address``."""
        self.parser.add_argument(
            "--metrics-address",
            metavar="HOST:PORT",
            type=address,
            default=self.given("METRICS_ADDRESS", "127.0.0.1:0"),
            help="where /metrics, /healthz and /readyz are served; port 0 takes a free one, and beyond loopback who "
            "reads metrics must show a token",
        )

    def add_logging(self) -> None:
        """Add the options of the log."""
        self.parser.add_argument("--log-format", choices=[*LogFormat], default=self.given("LOG_FORMAT", LogFormat.JSON))
        self.parser.add_argument("--log-level", choices=_LEVELS, default=self.given("LOG_LEVEL", "info"))


def level(name: str) -> int:
    """Return the number of a level of the log."""
    return logging.getLevelNamesMapping()[name.upper()]


def address(text: str) -> tuple[str, int]:
    """Read ``HOST:PORT``.

    Raises:
        argparse.ArgumentTypeError: If it is something else.
    """
    try:
        return split_address(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def in_cluster() -> bool:
    """Tell whether this is a pod whose cluster is meant."""
    return "KUBECONFIG" not in os.environ and "KUBERNETES_SERVICE_HOST" in os.environ


def _own_namespace() -> str:
    try:
        return NAMESPACE_FILE.read_text().strip()
    except OSError:
        return DEFAULT_NAMESPACE
