"""Rules of the API server for incoming objects: names, subresources, defaults, what a caller may not change."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any

from polyreme_cluster.port import CLUSTER_SCOPED, KINDS, ConflictError, InvalidObjectError, Manifest, ObjectRef

Validator = Callable[[Manifest], None]
"""Raises ``InvalidObjectError`` for an object that its schema refuses."""

CUSTOM = frozenset({"TrainingJob", "TrainingQueue", "ClusterTopology", "NodeFaultPolicy", "NodeIncident"})
HAS_STATUS = CUSTOM | {"Pod", "Node", "Service", "Job"}
"""Kinds with a status subresource: the object's own writes leave ``status`` alone."""
HAS_SPEC_GENERATION = CUSTOM | {"Pod"}
OBJECT_BYTES_MAX = 1_500_000
"""Largest object, as etcd's default of 1.5 MiB a request."""
ANNOTATION_BYTES_MAX = 262_144
"""Names and values of an object's annotations together."""
DATA_BYTES_MAX = 1_048_576
"""Values of a ConfigMap or a Secret together."""
POD_GRACE_S = 30
ENDED_PHASES = frozenset({"Succeeded", "Failed"})

_NAME = re.compile(r"[a-z0-9]([-a-z0-9.]*[a-z0-9])?")
_NAME_CHARACTERS_MAX = 253
_SERVER_OWNED = (
    "name",
    "namespace",
    "uid",
    "creationTimestamp",
    "deletionTimestamp",
    "deletionGracePeriodSeconds",
    "resourceVersion",
    "generation",
)


def timestamp(at_s: float) -> str:
    """Write a time as ``metav1.Time`` does, in whole seconds."""
    return datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def check_new(manifest: Manifest) -> ObjectRef:
    """Check kind, name and namespace of an object to be created.

    Raises:
        InvalidObjectError: Naming the field.
    """
    kind, metadata = manifest.get("kind"), manifest.get("metadata")
    if kind not in KINDS:
        raise InvalidObjectError(f"unknown kind: {kind!r}, expected one of {', '.join(KINDS)}", field="kind")
    name = metadata.get("name") if isinstance(metadata, dict) else None
    if (
        not isinstance(metadata, dict)
        or not isinstance(name, str)
        or len(name) > _NAME_CHARACTERS_MAX
        or not _NAME.fullmatch(name)
    ):
        raise InvalidObjectError(
            f"{kind} has no valid name: {name!r}, expected an RFC 1123 subdomain", field="metadata.name"
        )
    namespace = metadata.get("namespace", "")
    if bool(namespace) == (kind in CLUSTER_SCOPED):
        rule = "none for a cluster-scoped kind" if kind in CLUSTER_SCOPED else "one for this kind"
        raise InvalidObjectError(f"{kind} {name}: namespace {namespace!r}, expected {rule}", field="metadata.namespace")
    if metadata.get("resourceVersion"):
        raise InvalidObjectError(f"{kind} {name} is new, it has no version yet", field="metadata.resourceVersion")
    return ObjectRef(kind=str(kind), namespace=namespace, name=name)


def prepare_new(manifest: Manifest, *, uid: str, version: int, now_s: float) -> Manifest:
    """Fill in what the server sets on a new object; ``manifest`` is the server's own copy and is changed."""
    metadata = manifest["metadata"]
    for name in ("deletionTimestamp", "deletionGracePeriodSeconds"):
        metadata.pop(name, None)
    metadata |= {"uid": uid, "resourceVersion": str(version), "creationTimestamp": timestamp(now_s)}
    if manifest["kind"] in HAS_SPEC_GENERATION:
        metadata["generation"] = 1
    if manifest["kind"] in HAS_STATUS and manifest["kind"] != "Node":
        manifest.pop("status", None)
    if manifest["kind"] == "Pod":
        manifest["status"] = {"phase": "Pending"}
    return manifest


def check_sizes(manifest: Manifest) -> None:
    """Check what the API server bounds inside an object.

    Raises:
        InvalidObjectError: Naming the field.
    """
    annotations = manifest["metadata"].get("annotations") or {}
    annotation_bytes = sum(len(name.encode()) + len(str(value).encode()) for name, value in annotations.items())
    data_bytes = 0
    if manifest["kind"] in {"ConfigMap", "Secret"}:
        data_bytes = sum(len(str(value).encode()) for value in (manifest.get("data") or {}).values())
    for field, seen, limit in (
        ("metadata.annotations", annotation_bytes, ANNOTATION_BYTES_MAX),
        ("data", data_bytes, DATA_BYTES_MAX),
    ):
        if seen > limit:
            raise InvalidObjectError(f"{ObjectRef.of(manifest)}: {seen} bytes, expected at most {limit}", field=field)


def patched(old: Manifest, merged: Manifest, *, subresource: str | None) -> Manifest:
    """Take from a merged object what this write may change.

    Raises:
        InvalidObjectError: If it changes UID or kind, or the subresource is unknown.
    """
    kind = old["kind"]
    if subresource is not None and (subresource != "status" or kind not in HAS_STATUS):
        raise InvalidObjectError(f"{kind} has no subresource {subresource!r}", field="subresource")
    if subresource == "status":
        result = dict(old)
        _take(result, merged, "status")
        if kind not in CUSTOM:
            # The API server's own kinds take labels and annotations with a status; custom resources do not.
            _check_identity(old, merged)
            result["metadata"] = _metadata(old, merged, (*_SERVER_OWNED, "ownerReferences"))
        return result
    _check_identity(old, merged)
    if kind in HAS_STATUS:
        merged = dict(merged)
        _take(merged, old, "status")
    return {**merged, "metadata": _metadata(old, merged, _SERVER_OWNED)}


def bumps_generation(old: Manifest, new: Manifest) -> bool:
    """Tell whether a change is one of the specification: anything but metadata and status."""
    if old["kind"] not in HAS_SPEC_GENERATION:
        return False
    names = (old.keys() | new.keys()) - {"metadata", "status"}
    return any(old.get(name) != new.get(name) for name in names)


def is_ended_pod(manifest: Manifest) -> bool:
    """Tell whether nothing of a pod can run: its phase is final, or no node has it."""
    phase = manifest.get("status", {}).get("phase")
    return phase in ENDED_PHASES or not manifest.get("spec", {}).get("nodeName")


def bound(pod: Manifest, *, uid: str, node: str, now_s: float) -> Manifest:
    """Return a pod with its node, as ``pods/binding`` writes it.

    Raises:
        ConflictError: If it is another pod, or one that may not be bound.
        InvalidObjectError: If the node has no name.
    """
    ref, metadata, spec = ObjectRef.of(pod), pod["metadata"], pod.get("spec") or {}
    if not node:
        raise InvalidObjectError(f"bind refused: {ref} to a node without a name", field="target.name")
    refusals = (
        (uid != metadata["uid"], f"has UID {metadata['uid']}, precondition {uid}"),
        (metadata.get("deletionTimestamp"), "is being deleted"),
        (spec.get("nodeName"), f"is on node {spec.get('nodeName')} already"),
        (spec.get("schedulingGates"), "waits at a scheduling gate"),
    )
    for refused, why in refusals:
        if refused:
            raise ConflictError(f"bind refused: {ref} {why}")
    status = pod.get("status") or {}
    others = [entry for entry in status.get("conditions") or () if entry["type"] != "PodScheduled"]
    scheduled = {"type": "PodScheduled", "status": "True", "lastTransitionTime": timestamp(now_s)}
    return {**pod, "spec": {**spec, "nodeName": node}, "status": {**status, "conditions": [*others, scheduled]}}


def own_grace_s(manifest: Manifest) -> int:
    """Grace period that a pod asks for itself."""
    return int(manifest.get("spec", {}).get("terminationGracePeriodSeconds", POD_GRACE_S))


def owner_uids(manifest: Manifest) -> list[str]:
    """UIDs of the objects that own this one."""
    return [owner["uid"] for owner in manifest["metadata"].get("ownerReferences") or ()]


def selects(manifest: Manifest, *, labels: Mapping[str, str], fields: Mapping[str, str]) -> bool:
    """Tell whether an object has these labels and these fields (dotted paths), all of them."""
    own = manifest["metadata"].get("labels") or {}
    if any(own.get(name) != value for name, value in labels.items()):
        return False
    return all(_field(manifest, path) == value for path, value in fields.items())


def _field(manifest: Manifest, path: str) -> str:
    value: Any = manifest
    for name in path.split("."):
        value = value.get(name) if isinstance(value, dict) else None
    return "" if value is None else str(value)


def _check_identity(old: Manifest, merged: Manifest) -> None:
    metadata = merged.get("metadata")
    if not isinstance(metadata, dict):
        raise InvalidObjectError(f"{ObjectRef.of(old)}: metadata is no object", field="metadata")
    uid = metadata.get("uid")
    if uid != old["metadata"]["uid"]:
        raise InvalidObjectError(f"{ObjectRef.of(old)}: UID never changes, seen {uid!r}", field="metadata.uid")
    for name in ("kind", "apiVersion"):
        if merged.get(name) != old.get(name):
            raise InvalidObjectError(
                f"{ObjectRef.of(old)}: {name} never changes, seen {merged.get(name)!r}", field=name
            )


def _metadata(old: Manifest, merged: Manifest, kept: tuple[str, ...]) -> Manifest:
    """Metadata of a write, with what is not the caller's to change as it was."""
    metadata = dict(merged["metadata"])
    for name in kept:
        _take(metadata, old["metadata"], name)
    return metadata


def _take(target: Manifest, source: Manifest, name: str) -> None:
    if name in source:
        target[name] = source[name]
    else:
        target.pop(name, None)
