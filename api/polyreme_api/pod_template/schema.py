"""Types of a pod template's fields, generated from Kubernetes' OpenAPI document (``tools/pod_template_schema.py``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib import resources
from typing import TypeAlias

FieldType: TypeAlias = "str | list[FieldType]"
"""``string``, ``boolean``, ``int32``, ``int64``, ``quantity``, ``intOrString``, ``object`` (free form), the name of one
of ``TYPES``, or ``["list", T]`` and ``["map", T]`` of another type."""

_FILE = json.loads(resources.files(__package__).joinpath("kubernetes.json").read_text(encoding="utf-8"))

VERSION: str = _FILE["kubernetes"]
"""Version of Kubernetes that the types are of."""
ROOT: str = _FILE["root"]
"""Name of the type of a whole template."""
TYPES: Mapping[str, Mapping[str, FieldType]] = _FILE["types"]
"""Types by name: the type of each field by the field's name."""

FORMAT = "pod-template"
"""Marks the field that holds a template in the JSON schema of the type that has it."""
QUANTITY_PATTERN = r"^[+]?([0-9]{1,19}(\.[0-9]{0,19})?|\.[0-9]{1,19})([KMGTPE]i|[numkMGTPE]|[eE][-+]?[0-9]{1,2})?$"
"""An amount as text: Kubernetes' syntax, without signs that no amount of a pod has, and with a bounded length."""
