"""Kubernetes' own PodTemplateSpec: the types of its fields, generated, and the check of a template against them."""

from polyreme_api.pod_template.schema import FORMAT, QUANTITY_PATTERN, ROOT, TYPES, FieldType
from polyreme_api.pod_template.unknown import unknown_fields
from polyreme_api.pod_template.validation import PodTemplateError, check_pod_template

__all__ = [
    "FORMAT",
    "QUANTITY_PATTERN",
    "ROOT",
    "TYPES",
    "FieldType",
    "PodTemplateError",
    "check_pod_template",
    "unknown_fields",
]
