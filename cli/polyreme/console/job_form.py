"""Form of a job, made from the schema of its definition: a field for each that a person may set.

What was changed in the form becomes settings, as ``--set`` has them; so the form can't say what a command can't.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import shlex
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import yaml

from polyreme.job_files import JobLoader
from polyreme.job_overrides import OPTION, parse_setting, with_setting
from polyreme.report.svg import safe
from polyreme_api.crd.definitions import JOB, object_schema
from polyreme_api.errors import InvalidConfigError

PREFIX = "set:"
"""Of the names of the form's fields; after it comes the path below spec."""
LEFT_OUT = ("workers.template", "suspend", "managedBy")
GENERAL = "general"
OPEN = ("training",)
"""Groups that are unfolded at first."""
NAME, NAMESPACE = "metadata.name", "metadata.namespace"
YAML_CHARACTERS_MAX = 1_000_000


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """A field of the form."""

    path: str
    """Below spec."""
    kind: str
    """``integer``, ``string``, ``boolean``, or ``yaml`` for lists and maps."""
    says: str
    default: Any = None
    choices: Sequence[str] = ()
    least: int | None = None
    most: int | None = None

    @property
    def group(self) -> str:
        """Top-level part of the spec."""
        head, dot, _ = self.path.partition(".")
        return head if dot else GENERAL


@functools.cache
def job_fields() -> tuple[Field, ...]:
    """Return the fields of a job, in the order of the schema."""
    return tuple(_fields("", object_schema(JOB)["properties"]["spec"]))


def read_base(text: str) -> dict[str, Any]:
    """Read the manifest that a form starts from.

    Raises:
        InvalidConfigError: If it is no YAML of one TrainingJob.
    """
    if len(text) > YAML_CHARACTERS_MAX:
        raise InvalidConfigError(f"job is too large: {len(text)} characters, expected at most {YAML_CHARACTERS_MAX}")
    try:
        found = [each for each in yaml.load_all(text, JobLoader) if each is not None]
    except (yaml.YAMLError, ValueError) as error:
        raise InvalidConfigError(f"not YAML: {' '.join(str(error).split())[:300]}", field="the YAML") from error
    if len(found) != 1 or not isinstance(found[0], dict) or not isinstance(found[0].get("spec"), dict):
        raise InvalidConfigError("expected the YAML of exactly one TrainingJob with a spec", field="the YAML")
    return found[0]


def settings_of(base: Mapping[str, Any], form: Mapping[str, Any]) -> list[str]:
    """Return what the form changes in its base, as ``--set`` has it.

    Args:
        base: The manifest that the form was made from.
        form: What was sent.
    """
    settings = []
    for path in (NAME, NAMESPACE):
        known = base.get("metadata", {}).get(path.rpartition(".")[2], "")
        wanted = str(form.get(PREFIX + path, "")).strip()
        settings += [f"{path}={wanted}"] if wanted and wanted != known else []
    for field in job_fields():
        typed = form.get(PREFIX + field.path)
        if not isinstance(typed, str):
            continue
        typed, before = " ".join(typed.split()), value_text(base, field)
        if typed != before:
            settings.append(f"{field.path}={typed or 'null'}")
    return settings


def changed(base: Mapping[str, Any], settings: Sequence[str]) -> Any:
    """Return the manifest with the settings.

    Raises:
        InvalidConfigError: If a value can't be read, naming its field.
    """
    manifest: Any = base
    for setting in settings:
        manifest = with_setting(manifest, parse_setting(setting))
    return manifest


def as_yaml(manifest: Any) -> str:
    """Write a manifest."""
    return yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=120)


def options_of(settings: Sequence[str]) -> str:
    """Write settings as options of a command."""
    return " ".join(f"{OPTION} {shlex.quote(setting)}" for setting in settings)


def value_text(base: Mapping[str, Any], field: Field) -> str:
    """Write the value that a manifest has at a field; nothing where it has none."""
    value: Any = base.get("spec")
    for part in field.path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return _written(value)


def fields_html(base: Mapping[str, Any]) -> str:
    """Return the fields, in folded groups, with the values of a manifest."""
    groups: dict[str, list[Field]] = {}
    for field in job_fields():
        groups.setdefault(field.group, []).append(field)
    ordered = sorted(groups, key=lambda name: (name not in OPEN, name == GENERAL))
    return "".join(_group(name, groups[name], base) for name in ordered)


def _group(name: str, fields: Sequence[Field], base: Mapping[str, Any]) -> str:
    given = sum(bool(value_text(base, field)) for field in fields)
    body = "".join(_field(field, value_text(base, field)) for field in fields)
    return (
        f'<details class="card"{" open" if name in OPEN else ""}><summary>{safe(name)} '
        f'<span class="soft">{given} of {len(fields)} given</span></summary><div class="fields">{body}</div></details>'
    )


def _field(field: Field, value: str) -> str:
    name, default = safe(PREFIX + field.path), _written(field.default)
    short = field.path.partition(".")[2] or field.path
    hint = f' placeholder="{safe(default)}"' if default else ""
    options = ("true", "false") if field.kind == "boolean" else field.choices
    if options:
        empty = f"default: {default}" if default else "not given"
        chosen = "".join(f"<option{' selected' if each == value else ''}>{safe(each)}</option>" for each in options)
        box = f'<select name="{name}"><option value="">{safe(empty)}</option>{chosen}</select>'
    elif field.kind == "yaml":
        box = f'<textarea name="{name}" rows="2" spellcheck="false"{hint}>{safe(value)}</textarea>'
    else:
        numbers = ' inputmode="numeric"' if field.kind == "integer" else ""
        box = f'<input name="{name}" value="{safe(value)}" autocomplete="off"{numbers}{hint}>'
    bounds = _bounds(field)
    wide = ' class="wide"' if field.kind == "yaml" else ""
    return f"<div{wide}><label>{safe(short)} {box}</label><small>{safe(field.says)}{safe(bounds)}</small></div>"


def _bounds(field: Field) -> str:
    if field.least is None or field.most is None:
        return ""
    return f" {field.least:,} to {field.most:,}."


def _fields(path: str, schema: Mapping[str, Any]) -> Iterator[Field]:
    for name, inner in schema["properties"].items():
        below = f"{path}.{name}".removeprefix(".")
        if below in LEFT_OUT:
            continue
        if inner.get("type") == "object" and inner.get("properties"):
            yield from _fields(below, inner)
            continue
        kind = inner.get("type", "string")
        choices = [str(each) for each in inner.get("enum", ())]
        yield Field(
            path=below,
            kind=kind if kind in {"integer", "string", "boolean"} else "yaml",
            says=str(inner.get("description", "")).replace("`", ""),
            default=inner.get("default"),
            choices=choices,
            least=inner.get("minimum"),
            most=inner.get("maximum"),
        )


def _written(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, (bool, list, dict)):
        return " ".join(json.dumps(value, ensure_ascii=False).split())
    return " ".join(str(value).split())
