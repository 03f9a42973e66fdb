"""The CustomResourceDefinition of TrainingJob, made from its pydantic types: YAML means the same in both worlds.

Pydantic's JSON schema becomes a structural schema (Kubernetes, "Extend the API with CustomResourceDefinitions"):
references inlined, optional instead of nullable, every object's fields listed. What the validators say across fields
becomes CEL, and what may not change while the job exists compares with its old self. Nothing is written by hand twice:
``tools/generate_crds.py`` writes the file, and a test holds it fresh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from polyreme_api.job.spec import LAUNCHER_PARTS, TrainingJob, TrainingJobSpec
from polyreme_api.job.status import TrainingJobStatus
from polyreme_api.labels import GROUP, KIND_JOB, PLURAL_JOB, VERSION

Schema = dict[str, Any]

SHORT_NAME = "tj"
MUTABLE = frozenset({"suspend", "workers.replicas"})
"""Fields of the spec that may change while the job exists."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """A rule across fields, in the Common Expression Language, with a message that names the fix."""

    rule: str
    message: str

    def to_object(self) -> dict[str, str]:
        """Return it as an entry of ``x-kubernetes-validations``."""
        return {"rule": self.rule, "message": self.message}


_DEGREES_GIVEN = " || ".join(f"has(self.{degree})" for degree in ("dp", "ep", "pp", "cp", "tp"))

RULES: Mapping[str, tuple[Rule, ...]] = {
    "TrainingJobSpec": tuple(
        Rule(
            rule=f"has(self.{part}) || self.workers.runtime.mode == 'Environment'",
            message=f"spec.{part} is required with workers.runtime.mode Launcher; set it or use mode: Environment",
        )
        for part in LAUNCHER_PARTS
    ),
    "Workers": (
        Rule(
            rule="!has(self.minReplicas) || self.minReplicas <= self.replicas",
            message="replicas lies below minReplicas; raise replicas or lower minReplicas",
        ),
        Rule(
            rule="!has(self.maxReplicas) || self.replicas <= self.maxReplicas",
            message="replicas lies above maxReplicas; lower replicas or raise maxReplicas",
        ),
    ),
    "Topology": (
        Rule(
            rule="!has(self.required) || !has(self.preferred)",
            message="required and preferred exclude each other; drop one",
        ),
        Rule(
            rule="has(self.sliceSize) == has(self.sliceLevel)",
            message="sliceSize and sliceLevel go together; set both or none",
        ),
    ),
    "Parallelism": (
        Rule(
            rule=f"self.mode != 'Auto' || !({_DEGREES_GIVEN})",
            message="mode Auto chooses the degrees itself; use mode: Explicit or drop dp, ep, pp, cp, tp",
        ),
        Rule(
            rule="self.mode != 'Explicit' || has(self.dp)",
            message="mode Explicit needs dp; set dp, the other degrees default to 1",
        ),
    ),
    "FailureRule": (
        Rule(
            rule="has(self.onExitCodes) != (has(self.onPodConditions) && size(self.onPodConditions) > 0)",
            message="a rule has either onExitCodes or onPodConditions; set exactly one",
        ),
    ),
    "Data": (
        Rule(
            rule="self.sources.all(a, self.sources.exists_one(b, b.name == a.name))",
            message="two sources have the same name; names are unique, rename one",
        ),
        Rule(
            rule="self.sources.exists(s, s.weight > 0)"
            " || (has(self.schedule) && size(self.schedule) > 0 && self.schedule[0].fromStep == 1)",
            message="every weight of sources is 0; give one source a weight above 0",
        ),
        Rule(
            rule="!has(self.schedule) || self.schedule.map(c, c.fromStep).isSorted()",
            message="fromStep of schedule must rise; order the changes",
        ),
    ),
    "MixtureChange": (
        Rule(
            rule="self.weights.exists(w, w.weight > 0)",
            message="every weight of this change is 0; raise one",
        ),
    ),
}
"""Rules by the pydantic type whose validators say the same."""

NAME_RULE = Rule(
    rule="self.metadata.name.size() <= 40 && self.metadata.name.matches('^[a-z0-9]([-a-z0-9]*[a-z0-9])?$')",
    message="metadata.name must be a DNS label of at most 40 characters, pods are named after it; choose another name",
)

LIST_KEYS: Mapping[tuple[str, str], str] = {
    ("MixtureChange", "weights"): "source",
    ("Evaluation", "sets"): "name",
    ("TrainingJobStatus", "conditions"): "type",
    ("Accounting", "lost"): "cause",
}
"""Lists that are maps, by the field that is their key: no two entries share it, and appliers merge them."""


def _column(name: str, kind: str, path: str, description: str, *, wide: bool = False) -> dict[str, Any]:
    column: dict[str, Any] = {"name": name, "type": kind, "jsonPath": path, "description": description}
    return {**column, "priority": 1} if wide else column


def _of_condition(kind: str, field: str) -> str:
    """Path into a condition by its type: conditions are a map, so their order means nothing."""
    return f'.status.conditions[?(@.type=="{kind}")].{field}'


PRINTER_COLUMNS: tuple[dict[str, Any], ...] = (
    _column("Ready", "integer", ".status.readyReplicas", "Pods that have joined the attempt."),
    _column("Workers", "integer", ".spec.workers.replicas", "Pods that are wanted."),
    _column("Queued", "string", _of_condition("Queued", "reason"), "Why the job waits, or that it was admitted."),
    _column("Running", "string", _of_condition("Running", "reason"), "What the ranks do, or why they do nothing."),
    _column("Succeeded", "string", _of_condition("Succeeded", "status"), "True once every step is trained."),
    _column("Failed", "string", _of_condition("Failed", "reason"), "Why the job failed, when it did."),
    _column("Attempt", "integer", ".status.attempt.number", "The current attempt."),
    _column("Layout", "string", ".status.layout", "The parallel layout."),
    _column("Age", "date", ".metadata.creationTimestamp", "Time since the job was created."),
    _column("Queue", "string", ".spec.queueName", "TrainingQueue of the job.", wide=True),
    _column("Step", "integer", ".status.step", "Newest step when the status was last written.", wide=True),
    _column("Checkpoint", "integer", ".status.lastCheckpoint.step", "Step of the newest durable one.", wide=True),
    _column("Restarts", "integer", ".status.restarts", "Restarts so far.", wide=True),
)
"""What ``kubectl get tj`` shows; what is wide needs ``-o wide``."""

_KEPT = (
    "type",
    "description",
    "default",
    "enum",
    "pattern",
    "minimum",
    "maximum",
    "minLength",
    "maxLength",
    "minItems",
    "maxItems",
    "minProperties",
    "maxProperties",
    "required",
)


def training_job_crd() -> dict[str, Any]:
    """Return the CustomResourceDefinition as a JSON-able dictionary, its keys in a fixed order."""
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": f"{PLURAL_JOB}.{GROUP}"},
        "spec": {
            "group": GROUP,
            "names": {
                "kind": KIND_JOB,
                "listKind": f"{KIND_JOB}List",
                "plural": PLURAL_JOB,
                "singular": KIND_JOB.lower(),
                "shortNames": [SHORT_NAME],
                "categories": ["all", "training"],
            },
            "scope": "Namespaced",
            "versions": [
                {
                    "name": VERSION,
                    "served": True,
                    "storage": True,
                    "schema": {"openAPIV3Schema": training_job_schema()},
                    "subresources": {
                        "status": {},
                        "scale": {
                            "specReplicasPath": ".spec.workers.replicas",
                            "statusReplicasPath": ".status.replicas",
                            "labelSelectorPath": ".status.selector",
                        },
                    },
                    "additionalPrinterColumns": [dict(column) for column in PRINTER_COLUMNS],
                }
            ],
        },
    }


def training_job_schema() -> Schema:
    """Return the structural schema of a whole TrainingJob object."""
    spec = _schema_of(TrainingJobSpec, with_defaults=True)
    _freeze(spec, path="")
    return {
        "type": "object",
        "description": _text(TrainingJob.__doc__ or ""),
        "required": ["spec"],
        "properties": {
            "apiVersion": {"type": "string", "description": f"`{GROUP}/{VERSION}`."},
            "kind": {"type": "string", "description": f"`{KIND_JOB}`."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": _schema_of(TrainingJobStatus, with_defaults=False),
        },
        "x-kubernetes-validations": [NAME_RULE.to_object()],
    }


def _schema_of(model: type[BaseModel], *, with_defaults: bool) -> Schema:
    document = model.model_json_schema(by_alias=True)
    definitions = {**document.pop("$defs", {}), model.__name__: document}
    return _Translator(definitions, with_defaults=with_defaults).object(model.__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Translator:
    """From pydantic's JSON schema to a structural one, references inlined."""

    definitions: Mapping[str, Schema]
    with_defaults: bool

    def object(self, name: str) -> Schema:
        """Translate the type of that name."""
        source = self.definitions[name]
        schema = self._own(source)
        required = set(source.get("required", ()))
        schema["properties"] = {
            field: self._property(inner, required=field in required) for field, inner in source["properties"].items()
        }
        for field, key in ((field, key) for (owner, field), key in LIST_KEYS.items() if owner == name):
            schema["properties"][field] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        if rules := RULES.get(name):
            schema["x-kubernetes-validations"] = [rule.to_object() for rule in rules]
        return schema

    def node(self, source: Schema) -> Schema:
        """Translate any node."""
        if "$ref" in source:
            inlined = self.object(source["$ref"].removeprefix("#/$defs/"))
            return {**inlined, **self._own(source)}
        if source.get("additionalProperties") is True:
            return {**self._own(source), "x-kubernetes-preserve-unknown-fields": True}
        schema = self._own(source)
        if "const" in source:
            schema["enum"] = [source["const"]]
        if isinstance(source.get("additionalProperties"), dict):
            schema["additionalProperties"] = self.node(source["additionalProperties"])
        if "items" in source:
            schema["items"] = self.node(source["items"])
        return schema

    def _property(self, source: Schema, *, required: bool) -> Schema:
        optional = "anyOf" in source
        if optional:
            (value,) = (choice for choice in source["anyOf"] if choice.get("type") != "null")
            source = {**value, **{key: inner for key, inner in source.items() if key not in {"anyOf", "default"}}}
        schema = self.node(source)
        fillable = schema["type"] == "object" and "required" not in schema
        if self.with_defaults and not required and not optional and fillable:
            schema["default"] = _default_of(schema)
        return schema

    def _own(self, source: Schema) -> Schema:
        own = {key: source[key] for key in _KEPT if key in source}
        if not self.with_defaults or own.get("default", ...) is None:
            own.pop("default", None)
        if "description" in own:
            own["description"] = _text(own["description"])
        return own


def _default_of(schema: Schema) -> Schema:
    """Return an object's default: empty, as the server fills it; written out where rules must hold of it."""
    if "x-kubernetes-validations" not in schema:
        return {}
    return {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner}


def _freeze(schema: Schema, *, path: str) -> None:
    """Add rules that keep every field as it was, except ``MUTABLE`` ones, which the walk goes around.

    A field's own rule runs only while it is there before and after; that it neither comes nor goes is its owner's rule.
    """
    rules = schema.setdefault("x-kubernetes-validations", [])
    for name, inner in schema["properties"].items():
        place = f"{path}{name}"
        if place in MUTABLE:
            continue
        if any(mutable.startswith(f"{place}.") for mutable in MUTABLE):
            _freeze(inner, path=f"{place}.")
            continue
        words = f"spec.{place} may not change while the job exists; delete the job and create it anew"
        inner.setdefault("x-kubernetes-validations", []).append(Rule(rule="self == oldSelf", message=words).to_object())
        if "default" not in inner and name not in schema.get("required", ()):
            rules.append(Rule(rule=f"has(self.{name}) == has(oldSelf.{name})", message=words).to_object())


def _text(docstring: str) -> str:
    return " ".join(docstring.replace("``", "`").split())
