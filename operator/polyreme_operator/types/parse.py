"""From Kubernetes-shaped JSON to views: the only place of the operator that knows the objects' shape on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from polyreme_api import labels
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus, parse_job
from polyreme_api.plan.plan import Plan, plan_for
from polyreme_api.progress import ProgressRecord
from polyreme_operator.port import Manifest
from polyreme_operator.types.intents import INTENTS_KEY, Intents, parse_intents
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import JobView, LeaseView, NodeView, PodPhase, PodView, QueueView

_ORDINARY_RESOURCES = frozenset({"cpu", "memory", "ephemeral-storage", "pods"})
OWNED_TAINT = "polyreme.dev/owned"
_OUT_OF_SERVICE = "node.kubernetes.io/out-of-service"


def parse_job_view(manifest: Manifest, known: JobView | None = None) -> JobView:
    """Read a TrainingJob. A spec that can't be read or planned is a view too: someone must tell the user.

    Args:
        manifest: The object.
        known: An earlier view of it; its plan is taken over while the spec's generation is the same.
    """
    metadata = manifest["metadata"]
    generation = metadata.get("generation", 0)
    if known is not None and known.uid == metadata["uid"] and known.generation == generation:
        spec, plan, invalid = known.spec, known.plan, known.invalid
    else:
        spec, plan, invalid = _plan(manifest)
    return JobView(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        generation=generation,
        created_s=parse_time_or(metadata.get("creationTimestamp"), 0.0),
        deleting=metadata.get("deletionTimestamp") is not None,
        spec=spec,
        plan=plan,
        invalid=invalid,
        status=TrainingJobStatus.model_validate(manifest.get("status") or {}),
    )


def parse_pod(manifest: Manifest) -> PodView | None:
    """Read a worker pod; None for a pod that is none of ours."""
    metadata = manifest["metadata"]
    tags: Mapping[str, str] = metadata.get("labels") or {}
    if labels.LABEL_JOB_UID not in tags:
        return None
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    resource, devices = _devices(spec)
    try:
        index, replacement = int(tags[labels.LABEL_INDEX]), int(tags[labels.LABEL_REPLACEMENT])
    except (KeyError, ValueError):
        return None
    ended = _terminated(status)
    return PodView(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        job_name=tags.get(labels.LABEL_JOB, ""),
        job_uid=tags[labels.LABEL_JOB_UID],
        queue=tags.get(labels.LABEL_QUEUE, ""),
        index=index,
        replacement=replacement,
        node=spec.get("nodeName", ""),
        resource=resource,
        devices=devices,
        phase=PodPhase(status.get("phase", "Pending")),
        deleting=metadata.get("deletionTimestamp") is not None,
        exit_code=None if ended is None else int(ended.get("exitCode", 0)),
        reason=status.get("reason", ""),
        message="" if ended is None else str(ended.get("message") or ""),
        conditions=tuple((entry["type"], entry["status"]) for entry in status.get("conditions") or ()),
    )


def parse_node(manifest: Manifest) -> NodeView:
    """Read a node."""
    status = manifest.get("status") or {}
    spec = manifest.get("spec") or {}
    ready = next((entry for entry in status.get("conditions") or () if entry["type"] == "Ready"), None)
    is_ready = ready is not None and ready["status"] == "True"
    allocatable = status.get("allocatable") or status.get("capacity") or {}
    since = parse_time_or(ready.get("lastTransitionTime"), 0.0) if ready is not None else 0.0
    return NodeView(
        name=manifest["metadata"]["name"],
        devices=tuple(
            (name, int(count))
            for name, count in sorted(allocatable.items())
            if name not in _ORDINARY_RESOURCES and str(count).isdigit()
        ),
        ready=is_ready,
        not_ready_since_s=None if is_ready else since,
        unschedulable=bool(spec.get("unschedulable")),
        out_of_service=any(taint["key"] == _OUT_OF_SERVICE for taint in spec.get("taints") or ()),
    )


def parse_lease(manifest: Manifest, *, seen_s: float, known: LeaseView | None = None) -> LeaseView | None:
    """Read a job's Lease; None for a Lease that is none of ours. A record that can't be read is no record.

    Args:
        manifest: The object.
        seen_s: When it came.
        known: An earlier view of it, for what lies between the two.
    """
    metadata = manifest["metadata"]
    uid = (metadata.get("labels") or {}).get(labels.LABEL_JOB_UID)
    if uid is None:
        return None
    text = (metadata.get("annotations") or {}).get(labels.ANNOTATION_PROGRESS)
    try:
        record = ProgressRecord.model_validate_json(text) if text else None
    except ValidationError:
        record = None
    advanced = (seen_s, 0.0 if record is None else record.updated_at_s)
    if known is not None and known.uid == metadata["uid"] and _place(known.record) == _place(record):
        advanced = (known.advanced_seen_s, known.advanced_said_s)
    return LeaseView(
        namespace=metadata.get("namespace", ""),
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        job_uid=uid,
        record=record,
        seen_s=seen_s,
        advanced_seen_s=advanced[0],
        advanced_said_s=advanced[1],
    )


def _place(record: ProgressRecord | None) -> tuple[object, ...] | None:
    """What of a record rises while an attempt gets on."""
    return None if record is None else (record.attempt, record.replacement, record.phase, record.step)


def parse_queue(manifest: Manifest) -> QueueView:
    """Read a TrainingQueue."""
    quota = (manifest.get("spec") or {}).get("quota") or {}
    return QueueView(
        name=manifest["metadata"]["name"], quota=tuple((name, int(count)) for name, count in sorted(quota.items()))
    )


def parse_intents_object(manifest: Manifest) -> Intents | None:
    """Read the intents from their ConfigMap; None for another ConfigMap."""
    if manifest["metadata"]["name"] != labels.INTENTS_NAME:
        return None
    text = (manifest.get("data") or {}).get(INTENTS_KEY, "[]")
    return Intents(resource_version=manifest["metadata"]["resourceVersion"], entries=parse_intents(text))


def _plan(manifest: Manifest) -> tuple[TrainingJobSpec | None, Plan | None, str]:
    try:
        document = {key: manifest[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in manifest}
        spec = parse_job(document).spec
    except InvalidConfigError as error:
        return None, None, str(error)
    try:
        return spec, plan_for(spec), ""
    except InvalidConfigError as error:
        return spec, None, str(error)


def _devices(spec: Mapping[str, Any]) -> tuple[str, int]:
    for container in spec.get("containers") or ():
        for name, count in sorted(((container.get("resources") or {}).get("limits") or {}).items()):
            if name not in _ORDINARY_RESOURCES and str(count).isdigit():
                return name, int(count)
    return "", 0


def _terminated(status: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """How the first container that ended did so."""
    for container in status.get("containerStatuses") or ():
        ended: Mapping[str, Any] | None = (container.get("state") or {}).get("terminated")
        if ended is not None:
            return ended
    return None
