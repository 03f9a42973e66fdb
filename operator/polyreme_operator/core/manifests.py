"""The objects that a job owns: pods, headless Service, Lease, Secret. All die with the job, by owner reference."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

from polyreme_api import environment, labels
from polyreme_api.job import TrainingJobSpec
from polyreme_api.job.status import AttemptStatus
from polyreme_operator.port import Manifest
from polyreme_operator.types.views import JobView

TOKEN_FILE = "/var/run/secrets/kubernetes.io/serviceaccount/token"
SECRET_FOLDER = "/var/run/secrets/polyreme.dev"
GRACE_EXTRA_S = 10
"""Time that a pod has beyond its checkpoint's grace to end."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PodDefaults:
    """What the operator's installation says of every worker pod; a job's own template goes before it."""

    image: str = "polyreme/trainer:latest"
    command: tuple[str, ...] = ("python", "-m", "polyreme.launcher")
    api_url: str = "https://kubernetes.default.svc"
    checkpoint_root: str = "file:///var/lib/polyreme/checkpoints"
    """Checkpoints of jobs that name no location lie under ``<root>/<namespace>/<name>``."""
    environment: tuple[tuple[str, str], ...] = ()
    """Further variables, as the registry's and the object store's URLs."""


def owner(job: JobView) -> dict[str, Any]:
    """Owner reference to the job."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "name": job.name,
        "uid": job.uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def service(job: JobView) -> Manifest:
    """Headless Service that finds index 0, ready or not."""
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
    """Secret that launchers prove to each other; the shell adds the bytes."""
    return {**_owned(job, "v1", "Secret"), "type": "Opaque", "immutable": True}


def pod(
    job: JobView, spec: TrainingJobSpec, attempt: AttemptStatus, *, index: int, node: str, defaults: PodDefaults
) -> Manifest:
    """Worker pod for one place. It bears no attempt: a restart in place touches no pod."""
    replacement = attempt.replacement(index)
    template = copy.deepcopy(spec.workers.template)
    metadata: dict[str, Any] = template.get("metadata") or {}
    body: dict[str, Any] = template.get("spec") or {}
    tags = {
        **(metadata.get("labels") or {}),
        labels.LABEL_JOB: job.name,
        labels.LABEL_JOB_UID: job.uid,
        labels.LABEL_INDEX: str(index),
        labels.LABEL_REPLACEMENT: str(replacement),
        labels.LABEL_QUEUE: spec.queue_name,
    }
    name = labels.pod_name(job.name, job.uid, index=index, replacement=replacement)
    containers = body.get("containers") or [{}]
    variables = _variables(job, spec, attempt, index=index, replacement=replacement, name=name, defaults=defaults)
    containers[0] = _launcher(containers[0], spec, variables, defaults)
    grace_s = spec.checkpoint.preemption_grace_seconds + GRACE_EXTRA_S
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            "name": name,
            "namespace": job.namespace,
            "labels": tags,
            "annotations": dict(metadata.get("annotations") or {}),
            "ownerReferences": [owner(job)],
        },
        "spec": {
            "terminationGracePeriodSeconds": grace_s,
            **body,
            "containers": containers,
            "restartPolicy": "Never",
            "nodeName": node,
            "subdomain": labels.job_object_name(job.name, job.uid),
            "volumes": [
                *(body.get("volumes") or []),
                {"name": "polyreme", "secret": {"secretName": labels.job_object_name(job.name, job.uid)}},
            ],
        },
    }


def checkpoint_url(job: JobView, spec: TrainingJobSpec, defaults: PodDefaults) -> str:
    """Where the job's checkpoints lie."""
    return spec.checkpoint.location or f"{defaults.checkpoint_root.rstrip('/')}/{job.namespace}/{job.name}"


def _launcher(
    given: dict[str, Any], spec: TrainingJobSpec, variables: dict[str, str], defaults: PodDefaults
) -> dict[str, Any]:
    limits = {
        **((given.get("resources") or {}).get("limits") or {}),
        spec.workers.device_resource: str(spec.workers.devices),
    }
    own = [{"name": name, "value": value} for name, value in variables.items()]
    mount = {"name": "polyreme", "mountPath": SECRET_FOLDER, "readOnly": True}
    return {
        "name": "launcher",
        "image": defaults.image,
        "command": list(defaults.command),
        **given,
        "env": [*(entry for entry in given.get("env") or [] if entry.get("name") not in variables), *own],
        "resources": {**(given.get("resources") or {}), "limits": limits},
        "volumeMounts": [*(given.get("volumeMounts") or []), mount],
    }


def _variables(
    job: JobView,
    spec: TrainingJobSpec,
    attempt: AttemptStatus,
    *,
    index: int,
    replacement: int,
    name: str,
    defaults: PodDefaults,
) -> dict[str, str]:
    host = f"{labels.job_object_name(job.name, job.uid)}.{job.namespace}.svc"
    contract = environment.PodEnvironment(
        pod=name,
        job=job.name,
        namespace=job.namespace,
        job_uid=job.uid,
        index=index,
        replacement=replacement,
        replicas=attempt.replicas,
        devices=attempt.devices,
        leader_address=f"{host}:{environment.LEADER_PORT}",
        api_url=defaults.api_url,
        token_file=TOKEN_FILE,
        secret_file=f"{SECRET_FOLDER}/{labels.SECRET_KEY}",
        pod_directory="/var/lib/polyreme/pod",
        checkpoint_url=checkpoint_url(job, spec, defaults),
    )
    return {**dict(defaults.environment), **contract.render()}


def _owned(job: JobView, api_version: str, kind: str, *, spec: dict[str, Any] | None = None) -> Manifest:
    manifest: Manifest = {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": labels.job_object_name(job.name, job.uid),
            "namespace": job.namespace,
            "labels": {labels.LABEL_JOB: job.name, labels.LABEL_JOB_UID: job.uid},
            "ownerReferences": [owner(job)],
        },
    }
    if spec is not None:
        manifest["spec"] = spec
    return manifest
