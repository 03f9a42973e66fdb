"""The page of a TrainingJob's fields, written from its CRD: what a user looks up."""

from collections.abc import Iterator, Mapping
from typing import Any

Schema = Mapping[str, Any]

PREFACE = """\
# TrainingJob

`apiVersion: polyreme.dev/v1alpha1`, `kind: TrainingJob`. The same YAML goes to `kubectl apply` and to `polyreme run`.
This page is generated from the types in `api/polyreme_api/job`; `kubectl explain trainingjob.spec` says the same.

Numbers with a fraction are written as text (`"2e-3"`): Kubernetes APIs carry no floats. While a job exists only
`spec.workers.replicas` and `spec.suspend` may change.
"""


def reference_page(crd: Mapping[str, Any]) -> str:
    """Return the page in Markdown."""
    version = crd["spec"]["versions"][0]
    schema = version["schema"]["openAPIV3Schema"]
    parts = [PREFACE, _columns(version["additionalPrinterColumns"])]
    for top in ("spec", "status"):
        parts += [_section(path, part) for path, part in _objects(top, schema["properties"][top])]
    return "\n".join(parts)


def _objects(path: str, schema: Schema) -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema["properties"].items():
        for suffix, part in (("", inner), ("[]", inner.get("items", {}))):
            if "properties" in part:
                yield from _objects(f"{path}.{name}{suffix}", part)


def _section(path: str, schema: Schema) -> str:
    required = schema.get("required", ())
    rows = [
        f"| `{name}` | {_type(inner)} | {_default(name, inner, required)} | {_cell(inner.get('description', ''))} |"
        for name, inner in schema["properties"].items()
    ]
    rules = [
        f"- {rule['message'][:1].upper()}{rule['message'][1:]}."
        for rule in schema.get("x-kubernetes-validations", ())
        if "oldSelf" not in rule["rule"]
    ]
    table = ["| field | type | default | meaning |", "|---|---|---|---|", *rows]
    words = [f"## {path}", "", schema.get("description", ""), "", *table, ""]
    return "\n".join(words + (["Refused:", "", *rules, ""] if rules else []))


def _columns(columns: list[dict[str, Any]]) -> str:
    rows = [
        f"| {column['name']}{' (wide)' if column.get('priority') else ''} | `{_cell(column['jsonPath'])}` "
        f"| {column.get('description', '')} |"
        for column in columns
    ]
    return "\n".join(["## kubectl get tj", "", "| column | from | meaning |", "|---|---|---|", *rows, ""])


def _type(schema: Schema) -> str:
    match schema:
        case {"x-kubernetes-preserve-unknown-fields": True}:
            return "object, free form"
        case {"additionalProperties": dict(values)}:
            return f"map of {_type(values)}, {_range(schema, 'Properties', 'entries')}".rstrip(", ")
        case {"type": "array", "items": items}:
            return f"list of {_type(items)}, {_range(schema, 'Items', 'entries')}".rstrip(", ")
        case {"enum": values}:
            return " or ".join(f"`{value}`" for value in values)
        case {"type": "integer"}:
            return f"integer {_bounds(schema)}".rstrip()
        case {"type": "string"}:
            pattern = f", `{_cell(schema['pattern'])}`" if "pattern" in schema else ""
            return f"string, {_range(schema, 'Length', 'characters')}".rstrip(", ") + pattern
        case _:
            return str(schema["type"])


def _bounds(schema: Schema) -> str:
    low, high = schema.get("minimum"), schema.get("maximum")
    if high is None:
        return "" if low is None else f"from {low:,}"
    return f"{low:,} to {high:,}" if low is not None else f"up to {high:,}"


def _range(schema: Schema, noun: str, unit: str) -> str:
    low, high = schema.get(f"min{noun}", 0), schema.get(f"max{noun}")
    if high is None:
        return ""
    return f"{low:,} to {high:,} {unit}" if low else f"at most {high:,} {unit}"


def _default(name: str, schema: Schema, required: tuple[str, ...]) -> str:
    if name in required:
        return "**required**"
    default = schema.get("default")
    if default is None or default == {}:
        return ""
    return f"`{str(default).lower() if isinstance(default, bool) else default}`" if default != "" else '`""`'


def _cell(text: str) -> str:
    return text.replace("|", "\\|")
