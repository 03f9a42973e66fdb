"""Parses Kubernetes objects to views; no other module of the operator knows their JSON."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Callable, Collection, Mapping
from sys import intern
from typing import Any

from pydantic import ValidationError

from polyreme_api import labels
from polyreme_api.data_report import data_digest, read_report
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJobSpec, TrainingJobStatus, parse_job
from polyreme_api.job.schedule import schedule_faults
from polyreme_api.metadata import ObjectMeta
from polyreme_api.ownership import owner_of_pod
from polyreme_api.pod_template import unknown_fields
from polyreme_cluster.port import Manifest
from polyreme_operator.health.record import PROBATION
from polyreme_operator.types.admission import NONE, Additions, worker_requests
from polyreme_operator.types.intents import INTENTS_KEY, Intents, parse_intents
from polyreme_operator.types.inventory import Constraints, Requests
from polyreme_operator.types.parse_node import OWNED_TAINT, kept, parse_node
from polyreme_operator.types.plans import PlanRequest, counts_in_force
from polyreme_operator.types.pod_end import end_of
from polyreme_operator.types.pod_start import start_of
from polyreme_operator.types.pod_waiting import waiting_of
from polyreme_operator.types.priority import PriorityClassView, priority_of
from polyreme_operator.types.reasons import ConditionType, Reason
from polyreme_operator.types.resources import constraints_of, larger, pod_requests
from polyreme_operator.types.timestamps import parse_time_or
from polyreme_operator.types.views import ForeignPod, JobView, PodPhase, PodView

__all__ = [
    "OWNED_TAINT",
    "parse_foreign_pod",
    "parse_intents_object",
    "parse_job_view",
    "parse_node",
    "parse_pod",
    "parse_unreadable_job",
    "tolerations_of",
]
_SPECS_KEPT = 1024
_OWN_KEYS = f"{labels.GROUP}/"
STAYING = frozenset({"DaemonSet", "Node"})
"""Owners of pods that stay on a node that is emptied."""
MIRROR = "kubernetes.io/config.mirror"
"""Annotation of pods that a kubelet runs from its own files."""


def parse_job_view(
    manifest: Manifest,
    known: JobView | None = None,
    *,
    priorities: Mapping[str, PriorityClassView] | None = None,
    seen_s: float = 0.0,
    data_gate: bool = False,
    additions: Callable[[TrainingJobSpec], Additions] = lambda _: NONE,
    key_ids: tuple[str, ...] = (),
) -> JobView:
    """Parse a TrainingJob. An invalid spec yields a view too, so that it can be reported. Plans are not made here.

    Args:
        manifest: The object.
        known: An earlier view, whose arrival is kept, and whose plans are kept while the generation is the same.
        priorities: PriorityClasses by name.
        seen_s: When it was observed; 0 if unknown.
        data_gate: Whether its admission waits for its data.
        additions: Returns what the API server adds to its pods.
        key_ids: Names of the installation's keys.
    """
    metadata, generation = manifest["metadata"], manifest["metadata"].get("generation", 0)
    known = known if known is not None and known.uid == metadata["uid"] else None
    status, unreadable = _read_status(manifest, known)
    read = _read_or_known(manifest, known, generation, status)
    # Plans belong to a generation of the spec.
    planned = known if known is not None and known.generation == generation else None
    if read.spec is None and status.is_true("Admitted"):
        # It was read once, by another version of the operator: it is left as it is.
        unreadable = unreadable or read.invalid
    priority = priority_of(read.spec, priorities or {})
    data_report, data_unreadable = read_report(metadata.get("annotations"))
    return JobView(
        namespace=intern(metadata.get("namespace", "")),
        name=metadata["name"],
        uid=intern(metadata["uid"]),
        resource_version=metadata["resourceVersion"],
        generation=generation,
        created_s=parse_time_or(metadata.get("creationTimestamp"), 0.0),
        deleting=metadata.get("deletionTimestamp") is not None,
        **{name: getattr(read, name) for name in _SPEC_FIELDS},
        status=status,
        **_requests(read.spec, additions, known),
        plans=() if planned is None else planned.plans,
        size_refused="" if planned is None else planned.size_refused,
        priority=priority.value,
        class_missing=priority.class_missing,
        unreadable=unreadable,
        **_fault(known, generation),
        attempt_seen_s=_attempt_seen_s(status, known, seen_s),
        unready_s=_unready_s(status, known, seen_s),
        **_times(status, known, seen_s),
        key_ids=key_ids,
        data_gate=data_gate,
        data_report=data_report,
        data_unreadable=data_unreadable,
    )


def _read_or_known(manifest: Manifest, known: JobView | None, generation: int, status: TrainingJobStatus) -> _SpecView:
    """Return the values of a job's spec; a generation that is known is not parsed again."""
    if known is not None and known.generation == generation and known.spec is not None:
        return _SpecView(*(getattr(known, name) for name in _SPEC_FIELDS))
    read = _read_spec(manifest)
    if read.schedule_fault and status.attempt is None:
        # Of a job that has run, only an appended change can be wrong: the job must not fail by it.
        return _SpecView(None, invalid=f"spec is refused: {read.schedule_fault}")
    if read.planning is not None and read.spec is not None and generation > 1:
        in_force = counts_in_force(status, requested=read.spec.workers.replicas)
        planning = dataclasses.replace(read.planning, rescaled=True, in_force=in_force)
        read = dataclasses.replace(read, planning=planning)
    return read


def _requests(
    spec: TrainingJobSpec | None, additions: Callable[[TrainingJobSpec], Additions], known: JobView | None
) -> dict[str, Any]:
    """Return what a worker requests, and what is known of that from its pods. It is kept up to date in a known view."""
    stored = () if known is None else known.stored
    if known is not None and spec is known.spec:
        requests = known.requests
    else:
        requests = () if spec is None else larger(worker_requests(spec, additions(spec)), stored)
    return {"requests": requests, "stored": stored}


def _fault(known: JobView | None, generation: int) -> dict[str, Any]:
    """Return the fault of a decision about a job; a new spec has none yet."""
    return {
        "fault": "" if known is None or known.generation != generation else known.fault,
        "fault_reason": Reason.INTERNAL_ERROR if known is None else known.fault_reason,
        "fault_in_cycle": known is not None and known.fault_in_cycle,
    }


def _attempt_seen_s(status: TrainingJobStatus, known: JobView | None, seen_s: float) -> float:
    """Return when the attempt was first observed with its present desired state."""
    now, before = status.attempt, None if known is None else known.attempt
    if known is None or now is None or before is None:
        return seen_s
    same = (now.number, now.desired) == (before.number, before.desired)
    return known.attempt_seen_s if same else seen_s


def _unready_s(status: TrainingJobStatus, known: JobView | None, seen_s: float) -> float | None:
    """Return since when the job has been seen admitted while its pods were not ready."""
    if not status.is_true(ConditionType.ADMITTED) or status.is_true(ConditionType.PODS_READY):
        return None
    return seen_s if known is None or known.unready_s is None else known.unready_s


def _times(status: TrainingJobStatus, known: JobView | None, seen_s: float) -> dict[str, Any]:
    """Return when a job was admitted and when it ended, by the operator's clock."""
    before = {} if known is None else _recorded(known.status)
    return {
        name: _on_our_clock_s(at, seen_s, known=getattr(known, name, None), watched=before.get(name, "") is None)
        for name, at in _recorded(status).items()
    }


def _recorded(status: TrainingJobStatus) -> dict[str, str | None]:
    """Return the recorded times, by the view's field that says when this operator saw them."""
    return {
        "first_admitted_s": status.first_admitted_at,
        "admitted_s": _since(status, ConditionType.ADMITTED, "True"),
        "finished_s": (status.completed_at or "") if status.finished else None,
    }


def _since(status: TrainingJobStatus, kind: ConditionType, truth: str) -> str | None:
    """Return since when a condition has had this truth; None if it has another."""
    found = status.condition(kind)
    return found.last_transition_time if found is not None and found.status == truth else None


def _on_our_clock_s(recorded: str | None, seen_s: float, *, known: float | None, watched: bool) -> float | None:
    """Return when a recorded event happened, by the operator's clock; None if it has not happened.

    Another machine's clock may have written the time. It is used only where we did not watch it happen, and one that
    lies in our future is replaced by the present.
    """
    if recorded is None or not seen_s:
        return None
    if known is not None:
        return known
    return seen_s if watched else min(parse_time_or(recorded, seen_s), seen_s)


def parse_unreadable_job(manifest: Manifest, known: JobView | None, why: str) -> JobView:
    """Return the view of a job whose parsing raised an error: its earlier view, or only its identity.

    Args:
        manifest: The object.
        known: An earlier view of it; what it holds stays charged.
        why: The error.
    """
    metadata = manifest["metadata"]
    status, unreadable = _read_status(manifest, known)
    seen: dict[str, Any] = {
        "resource_version": metadata["resourceVersion"],
        "generation": metadata.get("generation", 0),
        "deleting": metadata.get("deletionTimestamp") is not None,
        "status": status,
        "unreadable": unreadable or why,
    }
    if known is not None and known.uid == metadata["uid"]:
        # The spec is that of the known generation: the next object is parsed again, whatever its generation.
        return dataclasses.replace(known, **{**seen, "generation": known.generation})
    return JobView(
        namespace=intern(metadata.get("namespace", "")),
        name=metadata["name"],
        uid=intern(metadata["uid"]),
        created_s=parse_time_or(metadata.get("creationTimestamp"), 0.0),
        spec=None,
        invalid="",
        **seen,
    )


def _read_status(manifest: Manifest, known: JobView | None) -> tuple[TrainingJobStatus, str]:
    """Parse a status; fields that can't be read keep their known values, so that charges stay, and are reported.

    Until a status says when the job came, its version at first sight does: versions rise as jobs come.
    """
    metadata, given, unreadable = manifest["metadata"], manifest.get("status") or {}, ""
    before = known.status if known is not None and known.uid == metadata["uid"] else None
    try:
        status = TrainingJobStatus.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        unreadable = f"{'.'.join(('status', *(str(part) for part in first['loc'])))} can't be read: {first['msg']}"
        bad = {found["loc"][0] for found in error.errors(include_url=False) if found["loc"]}
        status = TrainingJobStatus() if not bad else _without(given, bad, before or TrainingJobStatus())
    if status.attempt is not None and (before is None or before.attempt != status.attempt):
        try:
            status.attempt.placement.node_by_index()
        except (IndexError, TypeError, ValueError) as error:
            unreadable = f"status.attempt.placement can't be read: {error}"
            status = status.model_copy(update={"attempt": None if before is None else before.attempt})
    if status.arrival:
        return status, unreadable
    arrival = (before.arrival if before is not None else 0) or int(metadata["resourceVersion"])
    return status.model_copy(update={"arrival": arrival}), unreadable


def _without(given: Mapping[str, Any], bad: Collection[object], before: TrainingJobStatus) -> TrainingJobStatus:
    """Parse a status without some of its fields, which keep their known values."""
    status = TrainingJobStatus.model_validate({name: value for name, value in given.items() if name not in bad})
    fields = TrainingJobStatus.model_fields
    kept = {name: getattr(before, name) for name, field in fields.items() if (field.alias or name) in bad}
    return status.model_copy(update=kept)


def parse_pod(manifest: Manifest, *, seen_s: float | None = None, known: PodView | None = None) -> PodView | None:
    """Parse a worker pod; None for a pod that no job controls. Whether the job exists is not checked.

    Args:
        manifest: The object.
        seen_s: When it came: what happened to it is measured by our clock. None: by the clocks of those who wrote it.
        known: An earlier view of it.
    """
    metadata = manifest["metadata"]
    owned = owner_of_pod(metadata)
    if owned is None:
        return None
    owner, index, replacement = owned
    tags: Mapping[str, str] = metadata.get("labels") or {}
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    ended = end_of(spec, status)
    known = known if known is not None and known.uid == metadata["uid"] else None
    conditions = status.get("conditions") or ()
    refused = next((entry for entry in conditions if _refuses(entry)), None)
    return PodView(
        namespace=intern(metadata.get("namespace", "")),
        name=metadata["name"],
        uid=metadata["uid"],
        resource_version=metadata["resourceVersion"],
        job_name=intern(owner.name),
        job_uid=intern(owner.uid),
        queue=intern(tags.get(labels.LABEL_QUEUE, "")),
        index=index,
        replacement=replacement,
        node=intern(spec.get("nodeName") or ""),
        wanted=intern(_wanted_node(spec)),
        scheduler=intern(spec.get("schedulerName") or ""),
        requests=pod_requests(spec, status),
        generation=int(metadata.get("generation") or 0),
        phase=PodPhase(status.get("phase", "Pending")),
        seen_s=(seen_s or 0.0) if known is None else known.seen_s,
        deleting=metadata.get("deletionTimestamp") is not None,
        ends_by_s=_ends_by_s(metadata, seen_s, known),
        exit_code=None if ended is None else ended.code,
        container="" if ended is None or ended.first else intern(ended.name),
        termination="" if ended is None else ended.reason,
        memory_limited=ended is None or ended.limited,
        reason=intern(status.get("reason") or ""),
        message=str(status.get("message") or "") if ended is None else ended.message,
        conditions=kept(tuple((entry["type"], entry["status"]) for entry in conditions)),
        unschedulable_since_s=None if refused is None else _refused_since_s(refused, seen_s, known),
        unschedulable="" if refused is None else str(refused.get("message") or ""),
        waiting=waiting_of(status, None if known is None else known.waiting),
        start=start_of(status),
    )


def _ends_by_s(metadata: Mapping[str, Any], seen_s: float | None, known: PodView | None) -> float | None:
    deleted_at = metadata.get("deletionTimestamp")
    if deleted_at is None or seen_s is None:
        return parse_time_or(deleted_at, None)
    if known is not None and known.ends_by_s is not None:
        return known.ends_by_s
    return seen_s + float(metadata.get("deletionGracePeriodSeconds") or 0)


def _refused_since_s(refused: Mapping[str, Any], seen_s: float | None, known: PodView | None) -> float:
    if seen_s is None:
        return parse_time_or(refused.get("lastTransitionTime"), 0.0)
    return seen_s if known is None or known.unschedulable_since_s is None else known.unschedulable_since_s


def parse_foreign_pod(manifest: Manifest) -> ForeignPod | None:
    """Parse the usage of a foreign pod; None if it uses no node."""
    spec, status = manifest.get("spec") or {}, manifest.get("status") or {}
    if not spec.get("nodeName") or status.get("phase") in {PodPhase.SUCCEEDED, PodPhase.FAILED}:
        return None
    metadata = manifest["metadata"]
    owners = {str(owner.get("kind")) for owner in metadata.get("ownerReferences") or ()}
    stays = bool(owners & STAYING) or MIRROR in (metadata.get("annotations") or {})
    return _foreign(intern(spec["nodeName"]), pod_requests(spec, status), stays)


def parse_intents_object(manifest: Manifest) -> Intents | None:
    """Parse the intents' ConfigMap; None for another one. Invalid text yields unknown intents."""
    if manifest["metadata"]["name"] != labels.INTENTS_NAME:
        return None
    version = manifest["metadata"]["resourceVersion"]
    try:
        return Intents(resource_version=version, entries=parse_intents(manifest["data"][INTENTS_KEY]))
    except (KeyError, TypeError, ValueError):
        return Intents(resource_version=version, known=False)


@dataclasses.dataclass(frozen=True, slots=True)
class _SpecView:
    """Values derived from a spec, shared by jobs with equal specs."""

    spec: TrainingJobSpec | None
    invalid: str = ""
    constraints: Constraints = dataclasses.field(default_factory=Constraints)
    planning: PlanRequest | None = None
    data_digest: str = ""
    schedule_fault: str = ""
    template_unknown: str = ""


_SPEC_FIELDS = tuple(field.name for field in dataclasses.fields(_SpecView))
"""Fields that a JobView has too, under the same names."""


def _read_spec(manifest: Manifest) -> _SpecView:
    text = json.dumps(manifest.get("spec"), sort_keys=True)
    try:
        ObjectMeta.model_validate(manifest["metadata"])
        return _spec_of(text)
    except (ValidationError, InvalidConfigError):
        # Read whole, so that the message names the field as the user wrote it.
        document = {key: manifest[key] for key in ("apiVersion", "kind", "metadata", "spec") if key in manifest}
        try:
            return _asked(parse_job(document).spec, text)
        except InvalidConfigError as error:
            return _SpecView(None, invalid=str(error))


@functools.lru_cache(maxsize=_SPECS_KEPT)
def _spec_of(text: str) -> _SpecView:
    document = {
        "apiVersion": labels.API_VERSION,
        "kind": labels.KIND_JOB,
        "metadata": {"name": "any"},
        "spec": json.loads(text),
    }
    return _asked(parse_job(document).spec, text)


def _asked(spec: TrainingJobSpec, text: str) -> _SpecView:
    body: Mapping[str, Any] = spec.workers.template.get("spec") or {}
    accepted = [{"key": PROBATION, "operator": "Exists"}] if spec.accept_probation else []
    tolerant = {**body, "tolerations": [*tolerations_of(body), *accepted]}
    return _SpecView(
        spec,
        constraints=constraints_of(tolerant),
        planning=PlanRequest(text),
        data_digest=data_digest(spec) if spec.workers.runtime.mode == "Launcher" else "",
        template_unknown=unknown_fields(spec.workers.template),
        schedule_fault=next(iter(schedule_faults(spec.data, spec.training).values()), ""),
    )


def tolerations_of(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a pod template's tolerations plus the one for the operator's own nodes.

    Tolerations of other taints of polyreme.dev, which older jobs may have, are left out.
    """
    given = [each for each in body.get("tolerations") or [] if not (each.get("key") or "").startswith(_OWN_KEYS)]
    return [*given, {"key": OWNED_TAINT, "operator": "Exists"}]


def _wanted_node(spec: Mapping[str, Any]) -> str:
    """Return the single node that a pod's affinity names, as the operator sets it."""
    affinity = (spec.get("affinity") or {}).get("nodeAffinity") or {}
    required = affinity.get("requiredDuringSchedulingIgnoredDuringExecution") or {}
    terms = required.get("nodeSelectorTerms") or ()
    wanted = {_named_node(term) for term in terms}
    return wanted.pop() if len(wanted) == 1 else ""


def _named_node(term: Mapping[str, Any]) -> str:
    for field in term.get("matchFields") or ():
        values: list[Any] = field.get("values") or []
        if field.get("key") == "metadata.name" and field.get("operator") == "In" and len(values) == 1:
            return str(values[0])
    return ""


def _refuses(condition: Mapping[str, Any]) -> bool:
    named = condition["type"], condition["status"], condition.get("reason")
    return named == ("PodScheduled", "False", "Unschedulable")


@functools.lru_cache(maxsize=4096)
def _foreign(node: str, requests: Requests, stays: bool) -> ForeignPod:
    return ForeignPod(node=node, requests=requests, stays=stays)
