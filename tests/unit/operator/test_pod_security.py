"""A worker pod is restricted field by field, wherever its template does not say otherwise."""

from typing import Any

import pytest

from polyreme_operator.reconcile.pod_security import SECCOMP_ANNOTATION, restricted

POD = {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}}
CONTAINER = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
UNCONFINED = {"type": "Unconfined"}


def contexts(
    own: dict[str, Any] | None = None, *, pod: dict[str, Any] | None = None, **body: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the contexts of a pod and of its first container, which has a neighbour without one of its own."""
    annotations = body.pop("annotations", {})
    first = {"name": "a"} if own is None else {"name": "a", "securityContext": own}
    given = {**body, "containers": [first, {"name": "b"}], **({} if pod is None else {"securityContext": pod})}
    spec = restricted(given, annotations)
    return spec.get("securityContext", {}), spec["containers"][0].get("securityContext", {})


def test_a_pod_is_restricted_where_its_template_says_nothing() -> None:
    body = {"containers": [{"name": "a"}, {"name": "b"}], "initContainers": [{"name": "c"}]}
    spec = restricted(body, {})
    assert spec["securityContext"] == POD
    assert [each["securityContext"] for each in (*spec["containers"], *spec["initContainers"])] == [CONTAINER] * 3


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        ({}, CONTAINER),
        ({"runAsUser": 1000}, {**CONTAINER, "runAsUser": 1000}),
        ({"readOnlyRootFilesystem": True}, {**CONTAINER, "readOnlyRootFilesystem": True}),
        ({"runAsNonRoot": None, "capabilities": None}, CONTAINER),
        ({"allowPrivilegeEscalation": True}, {**CONTAINER, "allowPrivilegeEscalation": True}),
        ({"seccompProfile": UNCONFINED}, {**CONTAINER, "seccompProfile": UNCONFINED}),
        (
            {"capabilities": {"add": ["IPC_LOCK"]}},
            {**CONTAINER, "capabilities": {"add": ["IPC_LOCK"], "drop": ["ALL"]}},
        ),
        ({"capabilities": {"drop": ["NET_RAW"]}}, {**CONTAINER, "capabilities": {"drop": ["NET_RAW"]}}),
        ({"capabilities": {"add": ["ALL"]}}, {**CONTAINER, "capabilities": {"add": ["ALL"]}}),
        # The API server refuses allowPrivilegeEscalation: false beside these two.
        (
            {"capabilities": {"add": ["CAP_SYS_ADMIN"]}},
            {"capabilities": {"add": ["CAP_SYS_ADMIN"], "drop": ["ALL"]}},
        ),
        ({"privileged": True}, {"privileged": True, "capabilities": {"drop": ["ALL"]}, "runAsNonRoot": False}),
        ({"privileged": True, "runAsUser": 7}, {"privileged": True, "runAsUser": 7, "capabilities": {"drop": ["ALL"]}}),
        ({"privileged": False}, {**CONTAINER, "privileged": False}),
        # A container that runs as root can't start where root is forbidden.
        ({"runAsUser": 0}, {**CONTAINER, "runAsUser": 0, "runAsNonRoot": False}),
        ({"runAsUser": 0, "runAsNonRoot": True}, {**CONTAINER, "runAsUser": 0, "runAsNonRoot": True}),
    ],
    ids=str,
)
def test_what_a_container_says_is_kept_and_the_rest_is_restricted(
    own: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert contexts(own) == (POD, expected)


@pytest.mark.parametrize(
    ("pod", "expected", "container"),
    [
        ({"fsGroup": 1}, {**POD, "fsGroup": 1}, CONTAINER),
        ({"runAsUser": 1000}, {**POD, "runAsUser": 1000}, CONTAINER),
        ({"seccompProfile": UNCONFINED}, {**POD, "seccompProfile": UNCONFINED}, CONTAINER),
        ({"runAsNonRoot": False}, {**POD, "runAsNonRoot": False}, CONTAINER),
        ({"runAsUser": 0}, {"runAsUser": 0, "seccompProfile": POD["seccompProfile"]}, CONTAINER),
    ],
    ids=str,
)
def test_what_the_pod_says_is_kept_and_the_rest_is_restricted(
    pod: dict[str, Any], expected: dict[str, Any], container: dict[str, Any]
) -> None:
    assert contexts(pod=pod) == (expected, container)


def test_a_container_with_a_user_of_its_own_is_not_root_in_a_pod_that_is() -> None:
    assert contexts({"runAsUser": 7}, pod={"runAsUser": 0})[1] == {**CONTAINER, "runAsUser": 7, "runAsNonRoot": True}


def test_a_pod_for_windows_gets_nothing_that_the_api_server_refuses_there() -> None:
    assert contexts(os={"name": "windows"}) == ({"runAsNonRoot": True}, {})
    assert contexts(os={"name": "linux"}) == (POD, CONTAINER)


def test_an_old_seccomp_annotation_counts_as_the_template_s_word() -> None:
    assert contexts(annotations={SECCOMP_ANNOTATION: "unconfined"})[0] == {"runAsNonRoot": True}
