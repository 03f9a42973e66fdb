"""Identity of the objects of a job: a controller owner reference and a derived name. Labels only select."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api import labels


@dataclasses.dataclass(frozen=True, slots=True)
class JobOwner:
    """The TrainingJob that controls an object of its own namespace."""

    name: str
    uid: str


def job_owner(metadata: Mapping[str, Any]) -> JobOwner | None:
    """Return the TrainingJob that controls an object; None for an object that no TrainingJob controls."""
    for reference in metadata.get("ownerReferences") or ():
        group = str(reference.get("apiVersion", "")).partition("/")[0]
        if reference.get("controller") is True and (group, reference.get("kind")) == (labels.GROUP, labels.KIND_JOB):
            return JobOwner(name=str(reference.get("name", "")), uid=str(reference.get("uid", "")))
    return None


def owner_reference(job: str, uid: str) -> dict[str, Any]:
    """Return the reference by which a job controls an object."""
    return {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "name": job,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": False,
    }


def job_object_metadata(job: str, uid: str) -> dict[str, Any]:
    """Return labels and owner of an object that exists once per job."""
    tags = {labels.LABEL_JOB: job, labels.LABEL_JOB_UID: uid}
    return {"labels": tags, "ownerReferences": [owner_reference(job, uid)]}


def is_marked(metadata: Mapping[str, Any], uid: str) -> bool:
    """Tell whether an object has the job's label, by which it is watched, and the job as its controller."""
    owner = job_owner(metadata)
    return owner is not None and owner.uid == uid and (metadata.get("labels") or {}).get(labels.LABEL_JOB_UID) == uid


def owner_of_job_object(metadata: Mapping[str, Any]) -> JobOwner | None:
    """Return the job of a Lease or Service; None unless the object also has the name derived from its job."""
    owner = job_owner(metadata)
    if owner is None or metadata.get("name") != labels.job_object_name(owner.name, owner.uid):
        return None
    return owner


def owner_of_pod(metadata: Mapping[str, Any]) -> tuple[JobOwner, int, int] | None:
    """Return job, worker index and replacement number of a worker pod; None unless its name is derived from them."""
    owner = job_owner(metadata)
    if owner is None:
        return None
    tags = metadata.get("labels") or {}
    try:
        index, replacement = int(tags[labels.LABEL_INDEX]), int(tags[labels.LABEL_REPLACEMENT])
    except (KeyError, ValueError):
        return None
    if metadata.get("name") != labels.pod_name(owner.name, owner.uid, index=index, replacement=replacement):
        return None
    return owner, index, replacement
