"""A pod's effective requests are those that kube-scheduler counts.

The first table holds the inputs and results of Kubernetes' own tests of that function (k8s.io/component-helpers 0.36.3,
resource/helpers_test.go), of all options that kube-scheduler uses. The second one adds what the API server completes
before kube-scheduler sees a pod: requests from limits (core/v1 defaults.go), and from LimitRanges.
"""

from typing import Any

import pytest

from polyreme_operator.types.inventory import PODS
from polyreme_operator.types.resources import amounts, canonical, pod_requests

GIB, MIB = 1 << 30, 1 << 20
INFEASIBLE = {"type": "PodResizePending", "status": "True", "reason": "Infeasible"}


def takes(cpu: str = "", memory: str = "", **others: str) -> dict[str, str]:
    """A resource list; huge pages are given as ``huge_2Mi``."""
    given = {"cpu": cpu, "memory": memory}
    given |= {name.replace("huge_", "hugepages-").replace("_", "-"): amount for name, amount in others.items()}
    return {name: amount for name, amount in given.items() if amount}


def main(requests: dict[str, str] | None = None, limits: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    """A container."""
    resources = {"requests": requests or {}, "limits": limits or {}}
    return {"name": "c", "resources": {kind: given for kind, given in resources.items() if given}, **more}


def sidecar(requests: dict[str, str] | None = None, **more: Any) -> dict[str, Any]:
    return main(requests, restartPolicy="Always", **more)


def pod(*containers: dict[str, Any], init: tuple[dict[str, Any], ...] = (), **spec: Any) -> dict[str, Any]:
    return {"containers": list(containers), "initContainers": list(init), **spec}


def seen(
    actual: dict[str, str], allocated: dict[str, str] | None = None, *, init: bool = False, infeasible: bool = False
) -> dict[str, Any]:
    """The status of a pod with one container, as its kubelet reports it."""
    entry: dict[str, Any] = {"name": "c", "resources": {"requests": actual}}
    if allocated:
        entry["allocatedResources"] = allocated
    return {
        "initContainerStatuses" if init else "containerStatuses": [entry],
        "conditions": [INFEASIBLE] if infeasible else [],
    }


def own(requests: dict[str, str] | None = None, limits: dict[str, str] | None = None) -> dict[str, Any]:
    """The pod's own resources."""
    return {"resources": main(requests, limits)["resources"]}


SMALL, LARGE = takes("2m", "3Mi"), takes("4m", "5Mi")
KUBERNETES: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, str]]] = {
    "nothing": (pod(), {}, {}),
    "overhead alone": (pod(main(), overhead=takes("5", "5")), {}, takes("5", "5")),
    "requests and overhead": (
        pod(main(takes("1", "10")), init=(main(takes("1", "10")),), overhead=takes("5", "5")),
        {},
        takes("6", "15"),
    ),
    "requests, limits and overhead": (
        pod(main(takes("1", "10"), takes("2", "12")), overhead=takes("5", "5")),
        {},
        takes("6", "15"),
    ),
    "the sum of two containers": (
        pod(main(takes("1", "5"), takes("2", "10")), main(takes("4", "12"), takes("8", "24"))),
        {},
        takes("5", "17"),
    ),
    "an init container larger than the sum": (
        pod(
            main(takes("1", "5")),
            main(takes("4", "12")),
            init=(main(takes("1", "5")), main(takes("40", "120"))),
            overhead=takes("3", "8"),
        ),
        {},
        takes("43", "128"),
    ),
    "a larger init container": (pod(main(takes("1")), init=(main(takes("4")),)), {}, takes("4")),
    "larger containers": (pod(main(takes("2")), main(takes("3")), init=(main(takes("2")),)), {}, takes("5")),
    "overhead of what nothing requests": (
        pod(main(takes("2")), main(takes("3")), init=(main(takes("2"), takes("2")),), overhead=takes("1", "1Gi")),
        {},
        takes("6", "1Gi"),
    ),
    "a resize that is infeasible": (pod(main(takes("4"))), seen(takes("2"), infeasible=True), takes("2")),
    "a resize that became infeasible half-way": (
        pod(main(takes("6"))),
        seen(takes("2"), takes("4"), infeasible=True),
        takes("4"),
    ),
    "a resize without a condition": (pod(main(takes("4"))), seen(takes("2")), takes("4")),
    "the largest of three, resource by resource": (
        pod(main(takes("30m", "20M", ephemeral_storage="10G"))),
        seen(takes("10m", "30M", ephemeral_storage="20G"), takes("20m", "10M", ephemeral_storage="30G")),
        takes("30m", "30M", ephemeral_storage="30G"),
    ),
    "an infeasible resize of a sidecar": (
        pod(init=(sidecar(takes("4")),)),
        seen(takes("2"), init=True, infeasible=True),
        takes("2"),
    ),
    "a resize of a sidecar": (pod(init=(sidecar(takes("4")),)), seen(takes("2"), init=True), takes("4")),
    "a container that requests nothing and has something": (pod(main()), seen(takes("2")), takes("2")),
    "a sidecar that requests nothing and has something": (
        pod(init=(sidecar(),)),
        seen(takes("2"), init=True),
        takes("2"),
    ),
    "a sidecar beside a container": (pod(main(takes("1")), init=(sidecar(takes("1")),)), {}, takes("2")),
    "sidecars after an init container": (
        pod(
            main(takes("1")),
            init=(main(takes("5")), sidecar(takes("1")), sidecar(takes("2")), sidecar(takes("3"))),
        ),
        {},
        takes("7"),
    ),
    "an init container between sidecars": (
        pod(
            main(takes("1")),
            init=(main(takes("5")), sidecar(takes("1")), sidecar(takes("2")), main(takes("5")), sidecar(takes("3"))),
        ),
        {},
        takes("8"),
    ),
    "a sidecar, then a large init container": (
        pod(main(takes("100")), init=(sidecar(takes("10")), main(takes("200")))),
        {},
        takes("210"),
    ),
    "a container, a sidecar and an init container": (
        pod(main(takes("9")), init=(sidecar(takes("8")), main(takes("6")))),
        {},
        takes("17"),
    ),
    "the pod's own memory": (pod(main(), **own(takes(memory="2Mi"))), {}, takes(memory="2Mi")),
    "the pod's memory and a container's cpu": (
        pod(main(takes("2m")), **own(takes(memory="2Mi"))),
        {},
        takes("2m", "2Mi"),
    ),
    "a resource that a pod can't request for itself": (
        pod(main(takes(storage="3Mi")), **own(takes(storage="2Mi"))),
        {},
        takes(storage="3Mi"),
    ),
    "such a resource of the pod alone": (
        pod(main(takes(memory="3Mi")), **own(takes(storage="2Mi"))),
        {},
        takes(memory="3Mi"),
    ),
    "the pod's own requests count, not the sum": (pod(main(SMALL), **own(takes("8m", "6Mi"))), {}, takes("8m", "6Mi")),
    "an init container of two resources": (pod(main(SMALL), init=(main(LARGE),)), {}, LARGE),
    "a sidecar of two resources": (pod(main(SMALL), init=(sidecar(LARGE),)), {}, takes("6m", "8Mi")),
    "a sidecar and an init container of two resources": (
        pod(main(SMALL), init=(sidecar(LARGE), main(takes("8m", "6Mi")))),
        {},
        takes("12m", "11Mi"),
    ),
    "the pod's own requests above all of these": (
        pod(main(SMALL), init=(sidecar(LARGE), main(takes("8m", "6Mi"))), **own(takes("18m", "15Mi"))),
        {},
        takes("18m", "15Mi"),
    ),
    "huge pages of the pod": (
        pod(main(), **own(takes(memory="10Mi", huge_2Mi="2Mi"), takes(huge_2Mi="2Mi"))),
        {},
        takes(memory="10Mi", huge_2Mi="2Mi"),
    ),
    "huge pages of two sizes": (
        pod(
            main(),
            **own(takes("1", huge_2Mi="2Mi", huge_1Gi="1Gi"), takes(huge_2Mi="2Mi", huge_1Gi="1Gi")),
        ),
        {},
        takes("1", huge_2Mi="2Mi", huge_1Gi="1Gi"),
    ),
    "huge pages of the pod above a container's": (
        pod(
            main(takes(huge_2Mi="6Mi"), takes(huge_2Mi="6Mi")),
            **own(takes("1", huge_2Mi="10Mi"), takes(huge_2Mi="10Mi")),
        ),
        {},
        takes("1", huge_2Mi="10Mi"),
    ),
    "huge pages of two sizes, one of a container too": (
        pod(
            main(takes("1", huge_1Gi="2Gi"), takes(huge_1Gi="2Gi")),
            **own(takes("1", huge_2Mi="10Mi", huge_1Gi="2Gi"), takes(huge_2Mi="10Mi", huge_1Gi="2Gi")),
        ),
        {},
        takes("1", huge_2Mi="10Mi", huge_1Gi="2Gi"),
    ),
    "huge pages of one size of the pod, of another of a container": (
        pod(
            main(takes(memory="4Mi", huge_1Gi="1Gi"), takes(huge_1Gi="1Gi")),
            **own(takes("1", huge_2Mi="10Mi"), takes(huge_2Mi="10Mi")),
        ),
        {},
        takes("1", "4Mi", huge_2Mi="10Mi", huge_1Gi="1Gi"),
    ),
}


@pytest.mark.parametrize("case", KUBERNETES)
def test_requests_are_those_of_kubernetes_own_table(case: str) -> None:
    spec, status, expected = KUBERNETES[case]
    assert pod_requests(spec, status) == canonical({**amounts(expected), PODS: 1})


DEFAULTS = canonical(amounts(takes("6", "1Gi")))
COMPLETED: dict[str, tuple[dict[str, Any], dict[str, str]]] = {
    "limits of a container": (pod(main(limits=takes("3"))), takes("3")),
    "limits beside requests": (pod(main(takes("1"), takes("3", "1Gi"))), takes("1", "1Gi")),
    "limits of init containers and sidecars": (
        pod(main(limits=takes("9")), init=(sidecar() | {"resources": {"limits": takes("8")}}, main(limits=takes("6")))),
        takes("17"),
    ),
    "the pod's own limits": (pod(main(), **own(limits=takes("4"))), takes("4")),
    "the pod's own limits above its containers'": (
        pod(main(takes("1")), main(takes("2")), **own(limits=takes("8", "1Gi"))),
        takes("3", "1Gi"),
    ),
    "the pod's own limits and requests": (
        pod(main(takes("1")), **own(takes("2"), takes("8", "4Gi"))),
        takes("2", "4Gi"),
    ),
    "the pod's own limits and huge pages of a container": (
        pod(main(takes(huge_2Mi="4Mi"), takes(huge_2Mi="4Mi")), **own(limits=takes("4"))),
        takes("4", huge_2Mi="4Mi"),
    ),
    "the pod's own huge pages, as a limit": (
        pod(main(), **own(takes("1"), takes("1", huge_2Mi="4Mi"))),
        takes("1", huge_2Mi="4Mi"),
    ),
    "an amount of no whole byte": (pod(main(takes("1e3", "0.5"))), takes("1000", "1")),
    "null for absent": (
        {"containers": [{"name": "c", "resources": None}], "initContainers": None, "resources": None, "overhead": None},
        {},
    ),
}


@pytest.mark.parametrize("case", COMPLETED)
def test_requests_that_are_missing_are_completed_as_by_the_api_server(case: str) -> None:
    spec, expected = COMPLETED[case]
    assert pod_requests(spec) == canonical({**amounts(expected), PODS: 1})


@pytest.mark.parametrize(
    ("spec", "expected"),
    [
        (pod(main()), takes("6", "1Gi")),
        (pod(main(takes("1"))), takes("1", "1Gi")),
        (pod(main(takes("0"))), takes(memory="1Gi")),
        (pod(main(limits=takes("2"))), takes("2", "1Gi")),
        (pod(main(), main()), takes("12", "2Gi")),
        (pod(main(), init=(sidecar(), main())), takes("12", "2Gi")),
        (pod(main(), **own(takes("8"))), takes("8", "1Gi")),
        (pod(main(), **own(limits=takes("8"))), takes("8", "1Gi")),
        (pod(main(), overhead=takes("250m")), takes("6250m", "1Gi")),
    ],
    ids=str,
)
def test_a_limit_range_completes_each_container(spec: dict[str, Any], expected: dict[str, str]) -> None:
    assert pod_requests(spec, defaults=DEFAULTS) == canonical({**amounts(expected), PODS: 1})


def test_a_resize_of_the_whole_pod_counts_the_largest() -> None:
    spec = pod(main(takes("1")), **own(takes("4", "1Gi")))
    status = {"resources": {"requests": takes("6", "1Gi")}, "allocatedResources": takes("5", "2Gi")}
    assert dict(pod_requests(spec, status)) == {"cpu": 6000, "memory": 2 * GIB, PODS: 1}
    refused = {**status, "conditions": [INFEASIBLE]}
    assert dict(pod_requests(pod(main(), **own(takes("9", "4Gi"))), refused)) == {
        "cpu": 6000,
        "memory": 2 * GIB,
        PODS: 1,
    }
