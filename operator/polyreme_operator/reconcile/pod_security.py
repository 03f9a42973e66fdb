"""Security of a worker pod where its template says nothing: the restricted profile of the Pod Security Standards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

SECCOMP_ANNOTATION = "seccomp.security.alpha.kubernetes.io/pod"
"""By it an old template chooses a seccomp profile; the API server refuses a field that says something else."""
WINDOWS = "windows"


def restricted(body: Mapping[str, Any], annotations: Mapping[str, Any]) -> dict[str, Any]:
    """Complete the security contexts of a pod's spec, and of each of its containers, field by field.

    What the template says of a field is kept. A field is left out where the API server refuses it beside another one of
    the template, or where the container could not start with it.

    Args:
        body: The template's spec.
        annotations: The template's annotations.
    """
    is_windows = (body.get("os") or {}).get("name") == WINDOWS
    given = _stated(body.get("securityContext"))
    whole = dict(given)
    if given.get("runAsUser") != 0:
        whole.setdefault("runAsNonRoot", True)
    if not is_windows and SECCOMP_ANNOTATION not in annotations:
        whole.setdefault("seccompProfile", {"type": "RuntimeDefault"})
    contexts: dict[str, Any] = {"securityContext": whole} if whole else {}
    for key in ("initContainers", "containers"):
        if body.get(key):
            contexts[key] = [_container(each, given, whole, is_windows=is_windows) for each in body[key]]
    return {**body, **contexts}


def _container(
    container: Mapping[str, Any], given: Mapping[str, Any], whole: Mapping[str, Any], *, is_windows: bool
) -> dict[str, Any]:
    """Complete a container's security context.

    Args:
        container: The container.
        given: What the template says for the whole pod.
        whole: The pod's completed context.
        is_windows: Whether the pod is for Windows, where the API server refuses all that is Linux's.
    """
    own = _stated(container.get("securityContext"))
    context = dict(own)
    if not is_windows:
        capabilities = _stated(own.get("capabilities"))
        added = capabilities.get("add") or ()
        if "ALL" not in added:
            context["capabilities"] = {"drop": ["ALL"], **capabilities}
        if not own.get("privileged") and "CAP_SYS_ADMIN" not in added:
            context.setdefault("allowPrivilegeEscalation", False)
    if "runAsNonRoot" not in own and "runAsNonRoot" not in given:
        is_root = _is_root(own, given)
        if is_root == bool(whole.get("runAsNonRoot")):
            # It differs from the pod's other containers.
            context["runAsNonRoot"] = not is_root
    return {**container, "securityContext": context} if context else dict(container)


def _is_root(own: Mapping[str, Any], given: Mapping[str, Any]) -> bool:
    """Tell whether the template has a container run as root: by its user, or, without one, by its privileges."""
    user = own.get("runAsUser", given.get("runAsUser"))
    return bool(user == 0 or (user is None and own.get("privileged")))


def _stated(context: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the fields of a context that say something: null is absent to Kubernetes."""
    return {name: value for name, value in (context or {}).items() if value is not None}
