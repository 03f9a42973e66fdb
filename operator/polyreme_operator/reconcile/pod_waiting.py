"""Explains why pods don't start: a missing Secret, an image that can't be pulled, a node that creates no containers."""

from __future__ import annotations

import re
from collections.abc import Iterable

from polyreme_operator.types.views import PodView

_MISSING = re.compile(r'(secret|configmap) "([^"]+)" not found')
_KINDS = {"secret": "Secret", "configmap": "ConfigMap"}


def explain(pods: Iterable[PodView]) -> str:
    """Return one sentence about the first pod whose container can't be started; empty if there is none."""
    waiting = sorted(((pod.index, pod) for pod in pods if pod.waiting is not None), key=lambda pair: pair[0])
    if not waiting:
        return ""
    index, pod = waiting[0]
    more = f" (and {len(waiting) - 1} more)" if len(waiting) > 1 else ""
    where = f" on node {pod.node}" if pod.node else ""
    return f"worker {index}{more} can't start{where}: {_sentence(pod)}"


def not_started(pods: Iterable[PodView]) -> str:
    """Return one sentence about the first pod that has not started, and its node; empty if there is none."""
    found = sorted((pod.index, pod) for pod in pods if not pod.start.ran)
    if not found:
        return ""
    index, pod = found[0]
    more = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
    where = f"on node {pod.node}" if pod.node else "and is not bound to a node"
    return f"worker {index}{more}: pod {pod.name} has not started {where} ({pod.start.state or pod.phase})"


def _sentence(pod: PodView) -> str:
    state = pod.waiting
    assert state is not None
    missing = _MISSING.search(state.message)
    if missing is None:
        return f"{state.reason}{': ' if state.message else ''}{state.message}"
    kind, name = _KINDS[missing[1]], missing[2]
    command = "secret generic" if kind == "Secret" else "configmap"
    return (
        f"{kind} {name} does not exist in namespace {pod.namespace}; create it (kubectl create {command} {name} "
        f"-n {pod.namespace} --from-env-file=FILE), and the pods start by themselves"
    )
