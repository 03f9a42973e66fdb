"""Ends of the containers of a pod, as its kubelet reports them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from sys import intern
from typing import Any

from polyreme_api.exit_codes import ExitCode

OOM_KILLED = "OOMKilled"
_GROUPS = (("containerStatuses", "containers"), ("initContainerStatuses", "initContainers"))


@dataclasses.dataclass(frozen=True, slots=True)
class ContainerEnd:
    """The end of one container."""

    name: str
    first: bool
    """Whether it is the pod's first container, which runs the launcher or the ranks."""
    code: int
    reason: str
    """The kubelet's word: ``Completed``, ``Error``, ``OOMKilled``, ``StartError``, ``ContainerCannotRun``, ..."""
    message: str
    """Its termination message."""
    limited: bool
    """Whether a limit of memory is stated for it or for its pod."""


def end_of(spec: Mapping[str, Any], status: Mapping[str, Any]) -> ContainerEnd | None:
    """Return the end of the container that a pod's end is attributed to; None if none has ended.

    Of several that failed, one that was killed for its memory, else the one that ended first: a container that is
    stopped since another one failed has an exit code too. Init containers and sidecars count like others.
    """
    return min(_ends(spec, status), key=lambda pair: pair[0], default=(None, None))[1]


def _ends(spec: Mapping[str, Any], status: Mapping[str, Any]) -> Iterator[tuple[Any, ContainerEnd]]:
    own = _is_limited(spec)
    for at, (group, containers) in enumerate(_GROUPS):
        limited = {each.get("name"): _is_limited(each) for each in spec.get(containers) or ()}
        for place, container in enumerate(status.get(group) or ()):
            ended: Mapping[str, Any] | None = (container.get("state") or {}).get("terminated")
            if ended is None:
                continue
            name, code = str(container.get("name") or ""), int(ended.get("exitCode", 0))
            reason = intern(str(ended.get("reason") or ""))
            first = group == "containerStatuses" and name == next(iter(limited), name)
            message = str(ended.get("message") or "")
            end = ContainerEnd(name, first, code, reason, message, own or limited.get(name, False))
            yield (code == ExitCode.OK, reason != OOM_KILLED, str(ended.get("finishedAt") or ""), at, place), end


def _is_limited(of: Mapping[str, Any]) -> bool:
    return "memory" in ((of.get("resources") or {}).get("limits") or {})
