"""A pod's status as a kubelet writes it. Pure."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from typing import Any

from polyreme_api.exit_codes import ExitCode, code_of_signal
from polyreme_cluster.port import Manifest
from polyreme_local.kubelet.container import LOOPBACK

MESSAGE_CHARACTERS_MAX = 1024
CODE_UNKNOWN = code_of_signal(signal.SIGKILL)
"""Exit code of a pod whose end was not observed: as if killed."""


def running(pod: Manifest, *, at: str) -> Manifest:
    """Status of a pod whose process runs."""
    state = {"running": {"startedAt": at}}
    return {
        "phase": "Running",
        "startTime": at,
        "hostIP": LOOPBACK,
        "podIP": LOOPBACK,
        "conditions": [{"type": "Ready", "status": "True", "lastTransitionTime": at}],
        "containerStatuses": [{"name": _name(pod), "ready": True, "restartCount": 0, "state": state}],
    }


def ended(pod: Manifest, *, code: int, at: str, reason: str = "", message: str = "") -> Manifest:
    """Status of a pod whose process ended; a negative code is a signal, ``message`` what it said last."""
    succeeded = code == ExitCode.OK
    word = reason or ("Completed" if succeeded else "Error")
    terminated: dict[str, Any] = {
        "exitCode": code_of_signal(-code) if code < 0 else code,
        "finishedAt": at,
        "reason": word,
    }
    if code < 0:
        terminated["signal"] = -code
    if message:
        terminated["message"] = message[:MESSAGE_CHARACTERS_MAX]
    status: Manifest = {
        "phase": "Succeeded" if succeeded else "Failed",
        "conditions": [{"type": "Ready", "status": "False", "lastTransitionTime": at}],
        "containerStatuses": [
            {"name": _name(pod), "ready": False, "restartCount": 0, "state": {"terminated": terminated}}
        ],
    }
    return {**status, "reason": reason} if reason else status


def node(name: str, *, devices: int, resource: str, labels: Mapping[str, str], at: str) -> Manifest:
    """The node that a host registers."""
    capacity = {resource: str(devices), "pods": "110"}
    ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastTransitionTime": at, "message": ""}
    return {
        "apiVersion": "v1",
        "kind": "Node",
        "metadata": {"name": name, "labels": {**labels, "kubernetes.io/hostname": name}},
        "spec": {},
        "status": {"capacity": capacity, "allocatable": capacity, "conditions": [ready]},
    }


def _name(pod: Manifest) -> str:
    containers = pod["spec"].get("containers") or [{}]
    return str(containers[0].get("name", "main"))
