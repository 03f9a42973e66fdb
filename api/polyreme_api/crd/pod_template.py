"""A pod template as a structural schema: the same types that ``pod_template`` checks by, without descriptions.

Every object keeps fields that are unknown here, since a newer Kubernetes may know them.
"""

from __future__ import annotations

from typing import Any

from polyreme_api.crd.rules import TEMPLATE_RULES
from polyreme_api.pod_template import QUANTITY_PATTERN, ROOT, TYPES, FieldType

KEEPS_UNKNOWN = "x-kubernetes-preserve-unknown-fields"
_INT_OR_STRING = {"x-kubernetes-int-or-string": True}
_SCALARS: dict[str, dict[str, Any]] = {
    "string": {"type": "string"},
    "boolean": {"type": "boolean"},
    "int32": {"type": "integer", "format": "int32"},
    "int64": {"type": "integer", "format": "int64"},
    "intOrString": _INT_OR_STRING,
    "quantity": {**_INT_OR_STRING, "pattern": QUANTITY_PATTERN},
    "object": {"type": "object", KEEPS_UNKNOWN: True},
}
_BOUNDS: dict[tuple[str, str], dict[str, Any]] = {
    ("PodSpec", "tolerations"): {"maxItems": 128},
    ("Toleration", "key"): {"maxLength": 317},
}
"""Bounds of what rules read, by type and field: without them the server refuses the rules as too costly."""

_LEFT_OUT = frozenset({("PodSpec", "ephemeralContainers")})
"""Kubernetes refuses these in every template and every new pod; their types would be a twelfth of the definition."""


def pod_template_schema() -> dict[str, Any]:
    """Return the structural schema of a whole template.

    It is atomic: field managers own all of it or nothing. A template never changes, and each write of a status costs
    the API server a tenth less than with an owner for every field (docs/adr/0021).
    """
    return {**_schema(ROOT), "x-kubernetes-map-type": "atomic"}


def _schema(kind: FieldType) -> dict[str, Any]:
    if isinstance(kind, str):
        return dict(_SCALARS[kind]) if kind in _SCALARS else _object(kind)
    form, inner = kind
    if form == "list":
        return {"type": "array", "items": _schema(inner)}
    return {"type": "object", "additionalProperties": _schema(inner)}


def _object(name: str) -> dict[str, Any]:
    # A field that is null is absent to Kubernetes.
    fields = {
        field: {**_schema(inner), "nullable": True, **_BOUNDS.get((name, field), {})}
        for field, inner in TYPES[name].items()
        if (name, field) not in _LEFT_OUT
    }
    schema = {"type": "object", "properties": fields, KEEPS_UNKNOWN: True}
    if rules := TEMPLATE_RULES.get(name):
        schema["x-kubernetes-validations"] = [rule.to_object() for rule in rules]
    return schema
