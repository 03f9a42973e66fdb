"""Why a container of a pod can't be started, as the kubelet reports it."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from sys import intern
from typing import Any

MESSAGE_CHARACTERS_MAX = 300
USUAL = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons of a start that goes well."""
PULL_FAILED, PULL_BACKOFF = "ErrImagePull", "ImagePullBackOff"


@dataclasses.dataclass(frozen=True, slots=True)
class Waiting:
    """The state of a container that can't be started."""

    reason: str
    message: str


def waiting_of(status: Mapping[str, Any], known: Waiting | None) -> Waiting | None:
    """Return why the first such container of a pod can't be started; None if none waits in this way.

    Args:
        status: The pod's.
        known: What an earlier status said.
    """
    for group in ("initContainerStatuses", "containerStatuses"):
        for container in status.get(group) or ():
            state = (container.get("state") or {}).get("waiting") or {}
            reason = str(state.get("reason") or "")
            if not reason or reason in USUAL:
                continue
            if reason == PULL_BACKOFF and known is not None and known.reason == PULL_FAILED:
                # The kubelet alternates between both, and only the first one has the registry's answer.
                return known
            # Interned: the pods of a gang mostly wait for the same thing.
            message = " ".join(str(state.get("message") or "").split())[:MESSAGE_CHARACTERS_MAX]
            return Waiting(intern(reason), intern(message))
    return None
