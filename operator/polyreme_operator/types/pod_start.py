"""Start of a pod: whether it has run, and the state of its containers, as its kubelet reports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from sys import intern
from typing import Any

_GROUPS = ("initContainerStatuses", "containerStatuses")
_UNKNOWN = "ContainerStatusUnknown"
"""Reason of a container that the kubelet never saw when its pod ended."""
_NOT_STARTED = frozenset({"StartError", "ContainerCannotRun"})
"""Reasons of a container that the runtime could not start; it has an exit code nevertheless."""


@dataclasses.dataclass(frozen=True, slots=True)
class PodStart:
    """How far a pod has come."""

    ran: bool
    """Whether a container ran, or the runtime tried to run one."""
    failed: bool = False
    """Whether a container ended because the runtime could not start it."""
    state: str = ""
    """Reason for which the first container waits, such as ``ContainerCreating``; empty if none waits."""


RAN = PodStart(ran=True)


def start_of(status: Mapping[str, Any]) -> PodStart:
    """Return how far a pod has come, from its status."""
    containers = [each for group in _GROUPS for each in status.get(group) or ()]
    waits = (((each.get("state") or {}).get("waiting") or {}).get("reason") for each in containers)
    ended = [(each.get("state") or {}).get("terminated") or {} for each in containers]
    runs = status.get("phase") in {"Running", "Succeeded"}
    return PodStart(
        ran=runs or any(_has_run(each) for each in containers),
        failed=any(each.get("reason") in _NOT_STARTED for each in ended),
        state=intern(str(next(filter(None, waits), ""))),
    )


def _has_run(container: Mapping[str, Any]) -> bool:
    state, last = container.get("state") or {}, container.get("lastState") or {}
    if state.get("running") or last.get("terminated") or container.get("restartCount"):
        return True
    ended = state.get("terminated")
    return ended is not None and (ended.get("reason") != _UNKNOWN or bool(ended.get("startedAt")))
