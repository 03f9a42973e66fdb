"""What a real API server makes of worker pods: what it stores, and that it refuses none for what we add."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from kubernetes import client
from kubernetes.client import ApiException

from polyreme_cluster.port import Manifest
from polyreme_operator.reconcile.worker_pods import PodDefaults, WorkerPods
from polyreme_operator.types.admission import Additions, parse_limit_range, parse_runtime_class, worker_requests
from polyreme_operator.types.resources import larger, pod_requests
from polyreme_operator.types.views import JobView
from tests.cluster.kube import api_client, kubectl, new_namespace, until
from tests.unit.operator.operator_scenes import admitted, job

EXAMPLES = 150
ENOUGH = 40
"""Of so many examples the API server accepts at least so many templates as they are."""
RUNTIME_CLASS = "test-pod-admission"
DEFAULTS = {"defaultRequest": {"cpu": "300m", "memory": "64Mi"}, "default": {"cpu": "8", "memory": "1Gi"}}
BOUNDS = {"max": {"cpu": "16", "memory": "8Gi"}, "min": {"memory": "1Mi"}}
LIMITS: dict[str, list[dict[str, Any]]] = {
    "free": [],
    "defaults": [{"type": "Container", **DEFAULTS}],
    "bounds": [{"type": "Container", **BOUNDS}, {"type": "Pod", "max": {"cpu": "32"}}],
}


class RefusedPodError(Exception):
    """The API server's answer to a pod that it refuses."""

    def __init__(self, code: int, message: str) -> None:
        super().__init__(message)
        if code not in {403, 422}:
            raise AssertionError(f"{code}: {message}")


class Admission:
    """The API server, asked by dry runs what it would store."""

    def __init__(self, api: Any, kubeconfig: str) -> None:
        self._core: Any = client.CoreV1Api(api)
        self._kubeconfig = kubeconfig
        self.namespaces: dict[str, str] = {}
        self.limits: dict[str, Any] = {}
        self.runtime_class: Manifest = {}

    def store(self, manifest: Manifest, where: str) -> Manifest:
        """Return the pod as it would be stored.

        Raises:
            RefusedPodError: If it is refused.
        """
        namespace = self.namespaces[where]
        pod = {**manifest, "metadata": {**manifest["metadata"], "namespace": namespace, "ownerReferences": []}}
        # Not as the library's model of a pod, which may know fewer fields.
        try:
            answer = self._core.create_namespaced_pod(namespace, pod, dry_run="All", _preload_content=False)
        except ApiException as error:
            raise RefusedPodError(error.status, json.loads(str(error.body))["message"]) from error
        stored: Manifest = json.loads(answer.data)
        return stored

    def refusal(self, manifest: Manifest, where: str) -> str:
        """Return why a pod is refused; empty if it is not."""
        try:
            self.store(manifest, where)
        except RefusedPodError as error:
            return str(error)
        return ""

    def apply(self, manifest: Manifest, folder: Any, *where: str) -> None:
        path = folder / "applied.json"
        path.write_text(json.dumps(manifest))
        kubectl(self._kubeconfig, *where, "apply", "-f", str(path))


@pytest.fixture(scope="module")
def admission(kubeconfig: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admission]:
    folder = tmp_path_factory.mktemp("admission")
    with (
        api_client(kubeconfig) as api,
        new_namespace(api) as free,
        new_namespace(api) as defaults,
        new_namespace(api) as bounds,
        new_namespace(api) as restricted,
    ):
        made = Admission(api, kubeconfig)
        made.namespaces = {"free": free, "defaults": defaults, "bounds": bounds, "restricted": restricted}
        kubectl(kubeconfig, "label", "namespace", restricted, "pod-security.kubernetes.io/enforce=restricted")
        for where, limits in LIMITS.items():
            head = {"apiVersion": "v1", "kind": "LimitRange", "metadata": {"name": "limits"}}
            made.limits[where] = ()
            if limits:
                made.apply({**head, "spec": {"limits": limits}}, folder, "-n", made.namespaces[where])
                stored = json.loads(
                    kubectl(kubeconfig, "-n", made.namespaces[where], "get", "limitrange", "limits", "-o", "json")
                )
                made.limits[where] = parse_limit_range(stored)
                assert made.limits[where] == parse_limit_range({"spec": {"limits": limits}})
        made.runtime_class = {
            "apiVersion": "node.k8s.io/v1",
            "kind": "RuntimeClass",
            "metadata": {"name": RUNTIME_CLASS},
            "handler": "runc",
            "overhead": {"podFixed": {"cpu": "250m", "memory": "120Mi"}},
        }
        made.apply(made.runtime_class, folder)
        until(lambda: _is_known(made), "admission plugins have seen what they add")
        try:
            yield made
        finally:
            kubectl(kubeconfig, "delete", "runtimeclass", RUNTIME_CLASS, "--wait=false")


def _is_known(admission: Admission) -> bool:
    """Tell whether the admission plugins, which watch too, have seen LimitRanges and RuntimeClass."""
    try:
        stored = [
            admission.store(worker(owner({"runtimeClassName": RUNTIME_CLASS})), where)
            for where in ("defaults", "bounds")
        ]
    except RefusedPodError:
        return False
    return all("overhead" in pod["spec"] and "requests" in pod["spec"]["containers"][0]["resources"] for pod in stored)


def owner(body: Manifest, **metadata: Any) -> JobView:
    return job(workers={"replicas": 1, "template": {"metadata": metadata, "spec": body}})


def worker(view: JobView) -> Manifest:
    """The worker pod that the operator creates for a job."""
    placed = admitted(view, ("n0",))
    assert placed.spec is not None
    assert placed.attempt is not None
    pods = WorkerPods(placed, placed.spec, placed.attempt, defaults=PodDefaults(), mode="NodeAffinity")
    return pods.manifest(index=0, node="n0")


def bare(body: Manifest, **metadata: Any) -> Manifest:
    """A pod with the contexts that a template says, and nothing of ours."""
    containers = [{"image": "none.example/none:1", **container} for container in body["containers"]]
    spec = {**body, "containers": containers, "restartPolicy": "Never"}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "bare", **metadata}, "spec": spec}


# --------------------------------------------------------------------------------------------------------- requests


def amounts(largest: int = 4) -> st.SearchStrategy[dict[str, str]]:
    cpu = st.integers(0, largest * 4).map(lambda quarter: f"{quarter * 250}m")
    return st.fixed_dictionaries({}, optional={"cpu": cpu, "memory": st.integers(1, largest).map(lambda n: f"{n}Gi")})


@st.composite
def resources(draw: st.DrawFn) -> dict[str, Any]:
    """Resources of a container, its limits at least its requests."""
    requests = draw(amounts())
    limits = {name: "16" if name == "cpu" else "8Gi" for name in draw(st.sets(st.sampled_from(("cpu", "memory"))))}
    return {"requests": requests, "limits": limits}


@st.composite
def bodies(draw: st.DrawFn) -> dict[str, Any]:
    """Templates of pods that request in every way."""

    def container(name: str) -> dict[str, Any]:
        return {"name": name, "image": "none.example/none:1", "resources": draw(resources())}

    body: dict[str, Any] = {"containers": [container(f"c{at}") for at in range(draw(st.integers(1, 2)))]}
    init = [container(f"i{at}") for at in range(draw(st.integers(0, 3)))]
    body["initContainers"] = [{**each, **({"restartPolicy": "Always"} if draw(st.booleans()) else {})} for each in init]
    if draw(st.booleans()):
        body["runtimeClassName"] = RUNTIME_CLASS
    if draw(st.booleans()):
        # At least what the containers can request together.
        whole = {"cpu": "80", "memory": "40Gi"}
        picked = draw(st.sets(st.sampled_from(("cpu", "memory"))))
        body["resources"] = {draw(st.sampled_from(("requests", "limits"))): {name: whole[name] for name in picked}}
    return body


@pytest.mark.slow
def test_a_worker_is_charged_what_the_api_server_stores(admission: Admission) -> None:
    accepted = set[str]()

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(body=bodies(), where=st.sampled_from(sorted(LIMITS)))
    def compares(body: dict[str, Any], where: str) -> None:
        view = owner(body)
        assert view.spec is not None
        overhead = parse_runtime_class(admission.runtime_class) if body.get("runtimeClassName") else ()
        charged = worker_requests(view.spec, Additions(defaults=admission.limits[where], overhead=overhead))
        manifest = worker(view)
        try:
            stored = admission.store(manifest, where)
        except RefusedPodError:
            # More than the LimitRange allows, or containers that request more than their pod.
            return
        accepted.add(json.dumps(body))
        assert charged == pod_requests(stored["spec"], stored["status"])
        assert larger(charged, pod_requests(manifest["spec"])) == charged

    compares()
    assert len(accepted) >= ENOUGH


# --------------------------------------------------------------------------------------------------------- security

SECCOMP = st.sampled_from(
    ({"type": "RuntimeDefault"}, {"type": "Unconfined"}, {"type": "Localhost", "localhostProfile": "a"})
)
ADDED = st.sets(st.sampled_from(("NET_BIND_SERVICE", "IPC_LOCK", "SYS_ADMIN", "CAP_SYS_ADMIN", "ALL"))).map(sorted)
DROPPED = st.sampled_from((["ALL"], ["NET_RAW"], []))
USERS = st.sampled_from((0, 1, 1000))
CONTAINER_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "runAsUser": USERS,
    "runAsGroup": USERS,
    "runAsNonRoot": st.booleans(),
    "privileged": st.booleans(),
    "allowPrivilegeEscalation": st.booleans(),
    "readOnlyRootFilesystem": st.booleans(),
    "procMount": st.sampled_from(("Default", "Unmasked")),
    "seccompProfile": SECCOMP,
    "capabilities": st.fixed_dictionaries({}, optional={"add": ADDED, "drop": DROPPED}),
    "windowsOptions": st.just({"runAsUserName": "ContainerUser"}),
}
POD_FIELDS: dict[str, st.SearchStrategy[Any]] = {
    "runAsUser": USERS,
    "runAsNonRoot": st.booleans(),
    "fsGroup": USERS,
    "supplementalGroups": st.just([7]),
    "seccompProfile": SECCOMP,
    "windowsOptions": st.sampled_from(({"runAsUserName": "ContainerUser"}, {"hostProcess": True})),
}
WITHIN_RESTRICTED = {
    "runAsUser": st.just(1000),
    "runAsGroup": st.just(1000),
    "runAsNonRoot": st.just(True),
    "readOnlyRootFilesystem": st.booleans(),
    "allowPrivilegeEscalation": st.just(False),
    "seccompProfile": st.just({"type": "RuntimeDefault"}),
    "capabilities": st.fixed_dictionaries(
        {}, optional={"add": st.just(["NET_BIND_SERVICE"]), "drop": st.just(["ALL"])}
    ),
}
"""What a template may say that the restricted level allows."""


def contexts(
    container_fields: dict[str, st.SearchStrategy[Any]], pod_fields: dict[str, st.SearchStrategy[Any]], **body: Any
) -> st.SearchStrategy[dict[str, Any]]:
    """Templates with security contexts of these fields."""
    context = st.fixed_dictionaries({}, optional=container_fields) | st.none()
    fields = {"image": st.just("none.example/none:1"), "securityContext": context}
    pair = [st.fixed_dictionaries({"name": st.just(name), **fields}) for name in ("a", "b")]
    return st.fixed_dictionaries(
        {"containers": st.tuples(*pair).map(list)},
        optional={"securityContext": st.fixed_dictionaries({}, optional=pod_fields), **body},
    )


@pytest.mark.slow
def test_a_template_that_contradicts_nothing_gives_a_restricted_pod(admission: Admission) -> None:
    pod_fields = {name: field for name, field in WITHIN_RESTRICTED.items() if name in POD_FIELDS}
    pod_fields |= {"fsGroup": st.just(0), "supplementalGroups": st.just([7])}

    @settings(max_examples=EXAMPLES, deadline=None, database=None)
    @given(body=contexts(WITHIN_RESTRICTED, pod_fields, hostUsers=st.booleans()))
    def accepts(body: dict[str, Any]) -> None:
        assert admission.refusal(worker(owner(body)), "restricted") == ""

    accepts()


@pytest.mark.slow
def test_no_template_is_refused_for_what_is_added_to_it(admission: Admission) -> None:
    accepted = set[str]()
    systems = st.sampled_from(({"name": "linux"}, {"name": "windows"}))
    annotations = st.sampled_from(({}, {"seccomp.security.alpha.kubernetes.io/pod": "unconfined"}))

    @settings(max_examples=2 * EXAMPLES, deadline=None, database=None)
    @given(
        body=contexts(CONTAINER_FIELDS, POD_FIELDS, os=systems, hostUsers=st.booleans(), hostNetwork=st.booleans()),
        annotations=annotations,
    )
    def accepts(body: dict[str, Any], annotations: dict[str, str]) -> None:
        if admission.refusal(bare(body, annotations=annotations), "free"):
            return
        accepted.add(json.dumps(body))
        assert admission.refusal(worker(owner(body, annotations=annotations)), "free") == ""

    accepts()
    assert len(accepted) >= ENOUGH
