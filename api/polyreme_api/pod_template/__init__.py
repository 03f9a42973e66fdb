"""Kubernetes' own PodTemplateSpec: the types of its fields, generated, and the check of a template against them."""

from polyreme_api.pod_template.schema import QUANTITY_PATTERN, ROOT, TYPES, FieldType
from polyreme_api.pod_template.validation import ERROR_TYPE, check_pod_template

__all__ = ["ERROR_TYPE", "QUANTITY_PATTERN", "ROOT", "TYPES", "FieldType", "check_pod_template"]
