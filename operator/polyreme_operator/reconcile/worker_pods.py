"""Manifests of the objects that a job owns: pods, Service, Lease, Secret, and its leader's account and rights."""

from __future__ import annotations

import base64
import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api import environment, labels
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_api.ownership import job_object_metadata, owner_reference
from polyreme_cluster.port import Manifest
from polyreme_operator.reconcile import binding, ca_bundle, environment_runtime, pod_security
from polyreme_operator.reconcile.binding import BindingMode
from polyreme_operator.reconcile.ca_bundle import CaBundle
from polyreme_operator.types.views import JobView
from polyreme_planner.plan_inputs import memory_limit

TOKEN_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/token"
RBAC_VERSION = "rbac.authorization.k8s.io/v1"
SECRET_FOLDER = "/var/run/secrets/polyreme.dev"
POD_FOLDER = "/var/lib/polyreme/pod"
WRITABLE = {"polyreme-pod": POD_FOLDER, "polyreme-tmp": "/tmp"}  # noqa: S108 - the pod's own
"""Volumes of a launcher's own, by name: its user may write nowhere else, and the root file system may be read-only."""
SHARED_MEMORY = {"polyreme-memory": "/dev/shm"}  # noqa: S108 - the pod's own memory
"""Volume of a worker's own for what ranks exchange and keep in memory; containers get 64 MiB of it otherwise."""
SHARED_BYTES_A_DEVICE = 1 << 30
SHARED_PART_OF_LIMIT = 8
"""Part of the container's memory limit that it takes at most: what is written there counts as the container's."""
GRACE_EXTRA_S = 10
"""Time beyond the checkpoint's grace period for a pod to end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodDefaults:
    """Defaults of the installation for worker pods; a job's own template takes precedence."""

    image: str = "polyreme/trainer:latest"
    command: tuple[str, ...] = ("python", "-m", "polyreme_launcher")
    api_url: str = "https://kubernetes.default.svc"
    checkpoint_root: str = "file:///var/lib/polyreme/checkpoints"
    """Checkpoints of jobs without a location are stored under ``<root>/<namespace>/<name>``."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables, such as the URL of the object store; every pod's spec shows them."""
    worker_secret: str | None = None
    """Secret in the job's namespace whose keys become variables of the worker's container."""
    pull_secrets: tuple[str, ...] = ()
    """Secrets in the job's namespace by which ``image`` is pulled; a template with an image or Secrets of its own needs
    none of them."""
    ca_bundle: CaBundle | None = None
    """Authorities that workers trust."""
    binding: BindingMode = "NodeName"
    launcher_rbac: bool = False
    """Whether each job gets a ServiceAccount and a Role for its leader; the embedded cluster issues its own tokens and
    needs none."""


def service(job: JobView) -> Manifest:
    """Headless Service that resolves to index 0, ready or not."""
    return _owned(
        job,
        "v1",
        "Service",
        spec={
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {labels.LABEL_JOB_UID: job.uid, labels.LABEL_INDEX: "0"},
            "ports": [{"name": "leader", "port": environment.LEADER_PORT}],
        },
    )


def lease(job: JobView, spec: TrainingJobSpec) -> Manifest:
    """Lease on which the leader reports."""
    return _owned(
        job,
        "coordination.k8s.io/v1",
        "Lease",
        spec={"leaseDurationSeconds": spec.health.heartbeat_timeout_seconds},
    )


def secret(job: JobView) -> Manifest:
    """Secret by which launchers authenticate to each other, and their leader to the operator; without the key."""
    return {**_owned(job, "v1", "Secret", name=_secret_name(job)), "type": "Opaque", "immutable": True}


def _secret_name(job: JobView) -> str:
    return "" if job.attempt is None else job.attempt.secret_name


def has_own_account(job: JobView, spec: TrainingJobSpec) -> bool:
    """Tell whether a job's pods run as the job's own ServiceAccount.

    A template may name another one, as a cloud's identity needs it; containers without our launcher need none, and pods
    of an operator of 0.1.0 have that of their namespace.
    """
    signs = job.attempt is not None and bool(job.attempt.key_id)
    return signs and not environment_runtime.is_used(spec) and not _named_account(spec)


def _named_account(spec: TrainingJobSpec) -> str:
    body = spec.workers.template.get("spec") or {}
    # The second is Kubernetes' old name of the first.
    return str(body.get("serviceAccountName") or body.get("serviceAccount") or "")


def account(job: JobView) -> Manifest:
    """ServiceAccount of the job's pods, so that a leader's token has the rights of its own job alone."""
    return _owned(job, "v1", "ServiceAccount")


def ca_secret(job: JobView, bundle: CaBundle) -> Manifest:
    """Secret with the certificates that the job's workers mount."""
    manifest = {**_owned(job, "v1", "Secret"), "type": "Opaque", "immutable": True}
    name = bundle.object_name(manifest["metadata"]["name"])
    data = {ca_bundle.KEY: base64.b64encode(bundle.pem.encode()).decode()}
    return {**manifest, "metadata": {**manifest["metadata"], "name": name}, "data": data}


def role(job: JobView) -> Manifest:
    """Role of the job's leader: it may watch its own job and renew its own Lease, nothing else."""
    name = labels.job_object_name(job.name, job.uid)
    return {
        **_owned(job, RBAC_VERSION, "Role"),
        "rules": [
            {
                "apiGroups": [labels.GROUP],
                "resources": [labels.PLURAL_JOB],
                "resourceNames": [job.name],
                "verbs": ["get", "list", "watch"],
            },
            {
                "apiGroups": ["coordination.k8s.io"],
                "resources": ["leases"],
                "resourceNames": [name],
                "verbs": ["get", "patch"],
            },
        ],
    }


def role_binding(job: JobView, spec: TrainingJobSpec) -> Manifest:
    """Give the job's Role to the ServiceAccount of its pods."""
    own = labels.job_object_name(job.name, job.uid) if has_own_account(job, spec) else "default"
    name = _named_account(spec) or own
    return {
        **_owned(job, RBAC_VERSION, "RoleBinding", name=_secret_name(job)),
        "roleRef": {
            "apiGroup": "rbac.authorization.k8s.io",
            "kind": "Role",
            "name": labels.job_object_name(job.name, job.uid),
        },
        "subjects": [{"kind": "ServiceAccount", "name": name, "namespace": job.namespace}],
    }


class WorkerPods:
    """The worker pods of one attempt; their common parts are computed once.

    Args:
        job: The job.
        spec: Its spec.
        attempt: The attempt that they are created in.
        defaults: Defaults of the installation.
        mode: How they are bound.
    """

    def __init__(
        self,
        job: JobView,
        spec: TrainingJobSpec,
        attempt: AttemptStatus,
        *,
        defaults: PodDefaults,
        mode: BindingMode,
    ) -> None:
        self._job, self._attempt, self._mode = job, attempt, mode
        self._own = environment_runtime.is_used(spec)
        self._replacements = attempt.replacement_by_index
        where = checkpoint_url(job, spec, defaults)
        if self._own:
            contract = environment_runtime.variables(job, attempt, checkpoint_url=where)
        else:
            contract = _variables(job, attempt, defaults=defaults, checkpoint_url=where)
        self._variables = {**dict(defaults.environment), **contract}
        metadata: dict[str, Any] = spec.workers.template.get("metadata") or {}
        self._labels = {
            **(metadata.get("labels") or {}),
            labels.LABEL_JOB: job.name,
            labels.LABEL_JOB_UID: job.uid,
            labels.LABEL_QUEUE: spec.queue_name,
        }
        self._metadata = {
            "namespace": job.namespace,
            "annotations": metadata.get("annotations") or {},
            "ownerReferences": [owner_reference(job.name, job.uid)],
        }
        self._body = self._common_body(spec, defaults)
        ours = {*self._variables, *self._own_variables(0, 0, "")}
        self._environment: list[dict[str, Any]] = [
            entry for entry in self._body["containers"][0].get("env") or [] if entry.get("name") not in ours
        ]

    def manifest(self, *, index: int, node: str) -> Manifest:
        """Return the pod for one place. With a launcher it names no attempt, since a restart in place keeps pods.

        Pods share parts of their manifests, so the result must not be modified.

        Args:
            index: Its place.
            node: Its node.
        """
        job, replacement = self._job, self._replacements.get(index, 0)
        name = labels.pod_name(job.name, job.uid, index=index, replacement=replacement)
        tags = {**self._labels, labels.LABEL_INDEX: str(index), labels.LABEL_REPLACEMENT: str(replacement)}
        variables = {**self._variables, **self._own_variables(index, replacement, name)}
        own = [{"name": variable, "value": value} for variable, value in variables.items()]
        first, *others = self._body["containers"]
        # Only the leader uses the API server.
        token = {} if index == 0 and not self._own else {"automountServiceAccountToken": False}
        return {
            "apiVersion": "v1",
            "kind": "Pod",
            "metadata": {**self._metadata, "name": name, "labels": tags},
            "spec": {
                **token,
                **self._body,
                **binding.fields(self._body, mode=self._mode, node=node),
                "containers": [{**first, "env": [*self._environment, *own]}, *others],
            },
        }

    def _own_variables(self, index: int, replacement: int, name: str) -> dict[str, str]:
        if self._own:
            return environment_runtime.own_variables(self._attempt, index=index, pod=name)
        return {
            environment.POD: name,
            environment.INDEX: str(index),
            environment.REPLACEMENT: str(replacement),
        }

    def _common_body(self, spec: TrainingJobSpec, defaults: PodDefaults) -> dict[str, Any]:
        body: dict[str, Any] = copy.deepcopy(spec.workers.template.get("spec") or {})
        annotations: dict[str, Any] = (spec.workers.template.get("metadata") or {}).get("annotations") or {}
        containers = body.get("containers") or [{}]
        worker = _worker(containers[0], spec) if self._own else _launcher(containers[0], spec, defaults)
        containers[0] = _with_secret(_mounting(worker, SHARED_MEMORY), defaults.worker_secret)
        name = labels.job_object_name(self._job.name, self._job.uid)
        own = [{"name": volume, "emptyDir": {}} for volume in _mounted(containers[0], WRITABLE)]
        memory = {"medium": "Memory", "sizeLimit": _shared_size(spec)}
        own += [{"name": volume, "emptyDir": memory} for volume in _mounted(containers[0], SHARED_MEMORY)]
        if not self._own:
            own.append({"name": "polyreme", "secret": {"secretName": self._attempt.secret_name or name}})
        volumes = [*(body.get("volumes") or []), *own]
        if defaults.ca_bundle is not None:
            containers[0] = ca_bundle.mounted(containers[0])
            volumes.append(ca_bundle.volume(defaults.ca_bundle.object_name(name)))
        if defaults.pull_secrets and containers[0].get("image") == defaults.image:
            body.setdefault("imagePullSecrets", [{"name": secret} for secret in defaults.pull_secrets])
        if spec.priority_class_name and not self._job.class_missing:
            body.setdefault("priorityClassName", spec.priority_class_name)
        has_own = defaults.launcher_rbac and has_own_account(self._job, spec)
        account = {"serviceAccountName": name} if has_own else {}
        return {
            **account,
            "terminationGracePeriodSeconds": spec.checkpoint.preemption_grace_seconds + GRACE_EXTRA_S,
            **pod_security.restricted({**body, "containers": containers}, annotations),
            "restartPolicy": "Never",
            "subdomain": name,
            "volumes": volumes,
        }


def checkpoint_url(job: JobView, spec: TrainingJobSpec, defaults: PodDefaults) -> str:
    """Return where the job's checkpoints are stored."""
    return spec.checkpoint.location or f"{defaults.checkpoint_root.rstrip('/')}/{job.namespace}/{job.name}"


def _launcher(given: dict[str, Any], spec: TrainingJobSpec, defaults: PodDefaults) -> dict[str, Any]:
    mounts: list[dict[str, Any]] = [
        *(given.get("volumeMounts") or []),
        {"name": "polyreme", "mountPath": SECRET_FOLDER, "readOnly": True},
    ]
    launcher = {
        "image": defaults.image,
        "command": list(defaults.command),
        **_worker({"name": "launcher", **given}, spec),
        "volumeMounts": mounts,
    }
    return _mounting(launcher, WRITABLE)


def _mounting(container: dict[str, Any], own: Mapping[str, str]) -> dict[str, Any]:
    """Mount volumes of our own where the template mounts nothing."""
    mounts: list[dict[str, Any]] = container.get("volumeMounts") or []
    taken = {mount.get("mountPath") for mount in mounts}
    added = [{"name": name, "mountPath": path} for name, path in own.items() if path not in taken]
    return {**container, "volumeMounts": [*mounts, *added]}


def _mounted(container: dict[str, Any], own: Mapping[str, str]) -> list[str]:
    """Return the names of the volumes of our own that a container mounts."""
    return [mount["name"] for mount in container.get("volumeMounts") or [] if mount.get("name") in own]


def _shared_size(spec: TrainingJobSpec) -> str:
    """Size of a pod's shared memory: it is taken as it is written, and bounds what copies of checkpoints take."""
    size, limit = spec.workers.devices * SHARED_BYTES_A_DEVICE, memory_limit(spec.workers.template)
    return f"{(size if limit is None else min(size, limit // SHARED_PART_OF_LIMIT)) >> 20}Mi"


def _worker(given: dict[str, Any], spec: TrainingJobSpec) -> dict[str, Any]:
    """Add the devices to the first container's resources."""
    limits = {
        **((given.get("resources") or {}).get("limits") or {}),
        spec.workers.device_resource: str(spec.workers.devices),
    }
    return {"name": "worker", **given, "resources": {**(given.get("resources") or {}), "limits": limits}}


def _with_secret(container: dict[str, Any], name: str | None) -> dict[str, Any]:
    """Take variables from a Secret; those of the template and of the contract take precedence."""
    if name is None:
        return container
    return {**container, "envFrom": [{"secretRef": {"name": name}}, *(container.get("envFrom") or [])]}


def _variables(job: JobView, attempt: AttemptStatus, *, defaults: PodDefaults, checkpoint_url: str) -> dict[str, str]:
    """Return the launcher's variables for worker 0."""
    host = f"{labels.job_object_name(job.name, job.uid)}.{job.namespace}.svc"
    return environment.PodEnvironment(
        pod="",
        job=job.name,
        namespace=job.namespace,
        job_uid=job.uid,
        index=0,
        replacement=0,
        replicas=attempt.replicas,
        devices=attempt.devices,
        leader_address=f"{host}:{environment.LEADER_PORT}",
        api_url=defaults.api_url,
        token_file=TOKEN_FILE,
        secret_file=f"{SECRET_FOLDER}/{labels.SECRET_KEY}",
        pod_directory=POD_FOLDER,
        checkpoint_url=checkpoint_url,
    ).render()


def _owned(
    job: JobView, api_version: str, kind: str, *, name: str = "", spec: dict[str, Any] | None = None
) -> Manifest:
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": name or labels.job_object_name(job.name, job.uid),
            "namespace": job.namespace,
            **job_object_metadata(job.name, job.uid),
        },
    }
    if spec is not None:
        manifest["spec"] = spec
    return manifest
