"""Completion for kubectl: it runs ``kubectl_complete-polyreme`` with the words so far, and reads one answer a line.

The last line is a directive of cobra's, ``:4``: no files (https://pkg.go.dev/github.com/spf13/cobra).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from polyreme.plugin.main import app
from polyreme_api.errors import PolyremeError

if TYPE_CHECKING:
    from polyreme.plugin.target import Target

NO_FILES = ":4"
_TAKES_JOB = frozenset({"get", "describe", "why", "logs", "suspend", "resume", "scale", "cancel"})
_VALUES = {"-o": ("table", "wide", "json", "yaml", "name"), "--output": ("table", "wide", "json", "yaml", "name")}


def main() -> None:
    """Answer kubectl."""
    sys.stdout.write("\n".join([*answers(sys.argv[1:], app), NO_FILES]) + "\n")


def answers(words: Sequence[str], app: typer.Typer) -> list[str]:
    """Return what may follow; the last word is the one that is being typed."""
    *before, typed = words or [""]
    if not before:
        found = list(typer.main.get_group(app).commands)
    elif before[-1] in _VALUES:
        found = list(_VALUES[before[-1]])
    elif before[-1] in {"-n", "--namespace"}:
        found = sorted({namespace for namespace, _ in _jobs(before, None)})
    elif typed.startswith("-"):
        found = _options(app, before[0])
    elif before[0] in _TAKES_JOB:
        found = [name for _, name in _jobs(before, _chosen_namespace(before))]
    elif before[0] == "queue":
        found = _names(before, "TrainingQueue")
    elif before[0] == "incident":
        found = _names(before, "NodeIncident")
    else:
        found = []
    return [word for word in found if word.startswith(typed)]


def _options(app: typer.Typer, command: str) -> list[str]:
    group = typer.main.get_group(app)
    found = group.commands.get(command)
    return [] if found is None else sorted(opt for param in found.params for opt in param.opts if opt.startswith("--"))


def _value(words: Sequence[str], *names: str) -> str | None:
    for at, word in enumerate(words):
        if word in names and at + 1 < len(words):
            return words[at + 1]
        for name in names:
            if word.startswith(f"{name}="):
                return word.partition("=")[2]
    return None


def _target(words: Sequence[str], namespace: str | None = None) -> Target:
    from polyreme.plugin.target import Target

    path = _value(words, "--kubeconfig")
    return Target(
        kubeconfig=None if path is None else Path(path), context=_value(words, "--context"), namespace=namespace
    )


def _chosen_namespace(words: Sequence[str]) -> str | None:
    if "-A" in words or "--all-namespaces" in words:
        return None
    try:
        return _target(words, _value(words, "-n", "--namespace")).in_namespace
    except PolyremeError:
        return None


def _jobs(words: Sequence[str], namespace: str | None) -> list[tuple[str, str]]:
    items = _listed(words, "TrainingJob", namespace)
    return [(item["metadata"].get("namespace", ""), item["metadata"]["name"]) for item in items]


def _names(words: Sequence[str], kind: str) -> list[str]:
    return [item["metadata"]["name"] for item in _listed(words, kind)]


def _listed(words: Sequence[str], kind: str, namespace: str | None = None) -> list[dict[str, dict[str, str]]]:
    """List a kind; completion shows no errors."""
    from polyreme.plugin.reading import list_all

    try:
        return _target(words).run(lambda cluster: list_all(cluster, kind, namespace=namespace))
    except PolyremeError:
        return []
