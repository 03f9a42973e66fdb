"""Says how a pod ended, in a sentence for people."""

from __future__ import annotations

from polyreme_operator.types.pod_end import OOM_KILLED
from polyreme_operator.types.views import PodView

DEADLINE_EXCEEDED = "DeadlineExceeded"
_NOT_STARTED = frozenset({"ContainerCannotRun", "StartError"})
_PLAIN = frozenset({"", "Completed", "Error"})
"""Terminations that say no more than the exit code."""


def how_it_ended(pod: PodView) -> str:
    """Return how a pod ended: by its own code, by the kernel or by its kubelet."""
    who = f"container {pod.container} of pod {pod.name}" if pod.container else f"pod {pod.name}"
    code = "" if pod.exit_code is None else f"exit code {pod.exit_code}"
    why = f": {pod.message}" if pod.message else ""
    if pod.termination == OOM_KILLED:
        of_node = "" if pod.memory_limited else "; it states no limit, so that of its node counts"
        return f"{who} was killed for using more memory than its limit ({OOM_KILLED}, {code}){of_node}{why}"
    if pod.termination in _NOT_STARTED:
        return f"{who} could not be started ({pod.termination}, {code}){why}"
    if pod.reason == DEADLINE_EXCEEDED:
        how = ", ".join(filter(None, (DEADLINE_EXCEEDED, code)))
        return f"pod {pod.name} ran longer than its activeDeadlineSeconds ({how}){why}"
    words = [word for word in (pod.reason, pod.termination) if word not in _PLAIN]
    said = f" ({', '.join(dict.fromkeys(words))})" if words else ""
    return f"{who} ended as {pod.phase}{said}{f' with {code}' if code else ''}{why}"
