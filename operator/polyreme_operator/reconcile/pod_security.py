"""What a worker pod may do where its template says nothing: the restricted profile of the Pod Security Standards."""

from __future__ import annotations

from typing import Any

_POD: dict[str, Any] = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
_CONTAINER: dict[str, Any] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}


def restricted(body: dict[str, Any]) -> dict[str, Any]:
    """Give a pod's spec, and each of its containers, a security context where it has none.

    A template that says anything of a user or of privileges keeps its word: what is said for a container counts there,
    and the pod's part is left out when a container runs as a user of its own choice.
    """
    lists = {key: body[key] for key in ("initContainers", "containers") if body.get(key)}
    own = [container.get("securityContext") or {} for containers in lists.values() for container in containers]
    contexts: dict[str, Any] = {
        key: [{"securityContext": dict(_CONTAINER), **container} for container in containers]
        for key, containers in lists.items()
    }
    chosen = any(
        context.get(name) is not None for context in own for name in ("runAsUser", "runAsNonRoot", "privileged")
    )
    if "securityContext" not in body and not chosen:
        contexts["securityContext"] = dict(_POD)
    return {**body, **contexts}
