"""The five definitions: names, columns, subresources, schemas."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel

from polyreme_api import labels
from polyreme_api.crd.rules import OBJECT_RULES, UNFILLED, UNTIL_ADMITTED
from polyreme_api.crd.translate import Schema, default_of, freeze, plain_text, schema_of
from polyreme_api.fault_policy import NodeFaultPolicy
from polyreme_api.incident import NodeIncident
from polyreme_api.job.spec import TrainingJob
from polyreme_api.queue import TrainingQueue
from polyreme_api.topology import ClusterTopology

END = frozenset({"training.steps", "training.optimizer.decaySteps", "training.optimizer.finalLearningRate"})
"""Fields that say how a run ends. Whether a change alters no trained step is judged by the job's leader."""
MUTABLE = frozenset({"suspend", "workers.replicas", "data.onDamage", "checkpoint.keep", *END, *UNTIL_ADMITTED})
"""Fields of a job's spec that may change while it exists."""
APPEND_ONLY = {"data.schedule": "fromStep"}
"""Lists of a job's spec that may get more entries while it exists, by the field by which their entries rise."""

LAST_MAY_CHANGE = {"training.stages": "name"}
"""Lists of a job's spec whose last entry may change: how the last stage ends; the leader refuses its other changes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Definition:
    """What a kind's definition holds in addition to its schema."""

    model: type[BaseModel]
    plural: str
    short_name: str
    scope: Literal["Namespaced", "Cluster"]
    columns: tuple[dict[str, Any], ...]
    scale: Mapping[str, str] | None = None
    mutable: frozenset[str] | None = None
    """Fields of the spec that may change; None: all."""
    also: tuple[str, ...] = ()
    """More short names."""
    unfilled: frozenset[str] = frozenset()
    """Parts of the spec that stay away where the user leaves them out."""

    @property
    def kind(self) -> str:
        """Name of the kind."""
        return self.model.__name__


def _column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": 1} if wide else column


def _of_ready(field: str) -> str:
    """Path into the condition Ready, by its type: conditions are a map, so their order means nothing."""
    return f'.status.conditions[?(@.type=="Ready")].{field}'


_AGE = _column("Age", "date", ".metadata.creationTimestamp", "Time since it was created.")
_READY = _column("Ready", "string", _of_ready("status"), "Whether it is valid and in effect.")
_REASON = _column("Reason", "string", _of_ready("reason"), "Why, or why not.")

JOB = Definition(
    model=TrainingJob,
    plural=labels.PLURAL_JOB,
    short_name="tj",
    scope="Namespaced",
    columns=(
        _column("Queue", "string", ".spec.queueName", "TrainingQueue of the job."),
        _column("Ready", "string", ".status.ready", "Pods that have joined the attempt, out of all its pods."),
        _column("Attempt", "integer", ".status.attempt.number", "The current attempt."),
        _column("Step", "integer", ".status.step", "Newest step when the status was last written."),
        _column("Reason", "string", ".status.reason", "What the job is doing, or why it is not running."),
        _AGE,
        _column("Priority", "integer", ".status.priority", "Priority by which it waits.", wide=True),
        _column("Topology", "string", ".spec.topology.required", "Level that must hold the gang.", wide=True),
        _column("Preferred", "string", ".spec.topology.preferred", "Level that should hold it.", wide=True),
        _column("Layout", "string", ".status.layout", "The parallel layout.", wide=True),
        _column("Workers", "integer", ".spec.workers.replicas", "Number of worker pods requested.", wide=True),
        _column(
            "Checkpoint", "integer", ".status.lastCheckpoint.step", "Step of the newest durable checkpoint.", wide=True
        ),
        _column("Restarts", "integer", ".status.restarts", "Restarts so far.", wide=True),
        _column("Preemptions", "integer", ".status.preemptionCount", "Preemptions so far.", wide=True),
    ),
    scale={
        "specReplicasPath": ".spec.workers.replicas",
        "statusReplicasPath": ".status.replicas",
        "labelSelectorPath": ".status.selector",
    },
    mutable=MUTABLE,
    unfilled=UNFILLED,
)

QUEUE = Definition(
    model=TrainingQueue,
    plural="trainingqueues",
    short_name="tq",
    scope="Cluster",
    columns=(
        _column("Parent", "string", ".spec.parent", "Queue whose cohort it belongs to."),
        _column("Pending", "integer", ".status.pending", "Jobs that wait."),
        _column("Admitted", "integer", ".status.admitted", "Jobs that hold devices."),
        _READY,
        _REASON,
        _AGE,
        _column("Stop", "string", ".spec.stopPolicy", "Whether it admits jobs.", wide=True),
        _column("Weight", "integer", ".spec.weight", "Share among the queues of one parent.", wide=True),
        _column("Refused", "integer", ".status.refused", "Jobs that it does not accept.", wide=True),
        _column(
            "Reserving", "integer", ".status.reserving", "Jobs for which other jobs are being preempted.", wide=True
        ),
    ),
)

TOPOLOGY = Definition(
    model=ClusterTopology,
    plural="clustertopologies",
    short_name="ct",
    scope="Cluster",
    columns=(
        _column("Top", "string", ".spec.levels[0].name", "The widest level."),
        _column("Nodes", "integer", ".status.nodes", "Nodes that have every label."),
        _column("Unlabelled", "integer", ".status.unlabelled", "Nodes that lack a label."),
        _READY,
        _REASON,
        _AGE,
    ),
)

FAULT_POLICY = Definition(
    model=NodeFaultPolicy,
    plural="nodefaultpolicies",
    short_name="nfp",
    scope="Cluster",
    columns=(
        _column("Mode", "string", ".spec.mode", "Whether it acts or only reports what it would do."),
        _column("Nodes", "integer", ".status.nodes", "Nodes that are selected."),
        _column("Out", "integer", ".status.outOfService", "Selected nodes that are out of service."),
        _column("Would", "integer", ".status.wouldTakeOut", "Nodes that would be if every class were enforced."),
        _column("Latched", "boolean", ".status.breaker.latched", "Whether the breaker stops it."),
        _READY,
        _REASON,
        _AGE,
    ),
)

INCIDENT = Definition(
    model=NodeIncident,
    plural="nodeincidents",
    short_name="incident",
    also=("incidents",),
    scope="Cluster",
    columns=(
        _column("Node", "string", ".spec.node", "Name of the node."),
        _column("Class", "string", ".spec.faultClass", "Class of the fault."),
        _column("Reason", "string", ".spec.reason", "Code of the fault."),
        _column("State", "string", ".status.state", "State of the node, or ended."),
        _column("Since", "date", ".spec.since", "Time since the node left service."),
        _column("Device-hours", "string", ".status.deviceHours", "Device-hours that jobs lost."),
        _column("Owner", "string", ".spec.owner", "Who took the node out.", wide=True),
        _column("Device", "string", ".spec.device", "Device with the fault.", wide=True),
        _column("Ended", "string", ".status.ended", "How the incident ended.", wide=True),
    ),
)

DEFINITIONS = (JOB, QUEUE, TOPOLOGY, FAULT_POLICY, INCIDENT)


def crd(definition: Definition) -> dict[str, Any]:
    """Return the CustomResourceDefinition as a JSON-able dictionary, its keys in a fixed order."""
    kind = definition.kind
    scale = {} if definition.scale is None else {"scale": dict(definition.scale)}
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{definition.plural}.{labels.GROUP}"},
        "spec": {
            "group": labels.GROUP,
            "names": {
                "kind": kind,
                "listKind": f"{kind}List",
                "plural": definition.plural,
                "singular": kind.lower(),
                "shortNames": [definition.short_name, *definition.also],
                "categories": ["all", "training"] if definition.scope == "Namespaced" else ["training"],
            },
            "scope": definition.scope,
            "versions": [
                {
                    "name": labels.VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": object_schema(definition)},
                    "subresources": {"status": {}, **scale},
                    "additionalPrinterColumns": [dict(column) for column in definition.columns],
                }
            ],
        },
    }


def object_schema(definition: Definition) -> Schema:
    """Return the structural schema of a whole object."""
    parts = {name: _model_of(definition.model, name) for name in ("spec", "status")}
    spec = schema_of(parts["spec"], with_defaults=True, mode="validation", unfilled=definition.unfilled)
    required = definition.model.model_fields["spec"].is_required()
    if not required:
        spec["default"] = default_of(spec)
    if definition.mutable is not None:
        freeze(spec, mutable=definition.mutable, append_only=APPEND_ONLY, last_may_change=LAST_MAY_CHANGE)
    schema = {
        "type": "object",
        "description": plain_text(definition.model.__doc__ or ""),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"`{labels.API_VERSION}`."},
            "kind": {"type": "string", "description": f"`{definition.kind}`."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": schema_of(parts["status"], with_defaults=False, mode="serialization"),
        },
        "x-kubernetes-validations": [rule.to_object() for rule in OBJECT_RULES[definition.kind]],
    }
    return schema if required else {name: part for name, part in schema.items() if name != "required"}


def _model_of(model: type[BaseModel], field: str) -> type[BaseModel]:
    annotation = model.model_fields[field].annotation
    assert isinstance(annotation, type)
    assert issubclass(annotation, BaseModel)
    return annotation
