"""Find fields of a pod template that Kubernetes' types do not have: the API server drops them without a word.

They are reported and not refused, since the API server may be newer than the types.
"""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Iterator, Mapping
from typing import Any

from polyreme_api.pod_template.schema import ROOT, TYPES, VERSION, FieldType

TEMPLATE = "spec.workers.template"
"""Where a job has its template."""
NAMED_MAX = 5
"""Unknown fields that are named; more of them are counted."""
SHOWN_MAX = 60
"""Characters of a name that are shown."""
COUNTED_MAX = 100
"""Unknown fields that are counted."""
_NAMES = {
    "PodTemplateSpec": "a pod template",
    "ObjectMeta": "an object's metadata",
    "PodSpec": "a pod's spec",
    "Container": "a container",
    "EphemeralContainer": "an ephemeral container",
    "ResourceRequirements": "a container's resources",
    "SecurityContext": "a container's securityContext",
    "PodSecurityContext": "a pod's securityContext",
    "EnvVar": "an environment variable",
    "Volume": "a volume",
    "VolumeMount": "a volume mount",
    "Toleration": "a toleration",
    "Affinity": "an affinity",
}
"""Types by what people call them; others go by Kubernetes' own name."""


def unknown_fields(template: Mapping[str, Any]) -> str:
    """Return a sentence about each field of a job's template that the types do not have; empty if all are known."""
    found = list(itertools.islice(_unknown(template, ROOT, TEMPLATE), COUNTED_MAX))
    if not found:
        return ""
    more = f" (and {len(found) - NAMED_MAX} more)" if len(found) > NAMED_MAX else ""
    sentences = "; ".join(map(_sentence, found[:NAMED_MAX]))
    return f"{sentences}{more}. An API server drops fields that it doesn't know (those of {VERSION} were compared)"


def _sentence(found: tuple[str, str, str]) -> str:
    place, name, kind = found
    near = difflib.get_close_matches(name, TYPES[kind], n=1)
    hint = f"; did you mean {near[0]}?" if near else ""
    return f"{place}.{name} is no field of {_NAMES.get(kind, kind)}{hint}"


def _unknown(value: Any, kind: FieldType, place: str) -> Iterator[tuple[str, str, str]]:
    """Yield place, name and type for each field that its type does not have. A field that is null is absent."""
    if isinstance(kind, str):
        if kind not in TYPES or not isinstance(value, Mapping):
            return
        for name, inner in value.items():
            if name in TYPES[kind]:
                yield from _unknown(inner, TYPES[kind][name], f"{place}.{name}")
            elif inner is not None:
                yield place, str(name)[:SHOWN_MAX], kind
    elif kind[0] == "list":
        for at, item in enumerate(value if isinstance(value, list) else ()):
            yield from _unknown(item, kind[1], f"{place}.{at}")
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _unknown(item, kind[1], f"{place}.{str(key)[:SHOWN_MAX]}")
