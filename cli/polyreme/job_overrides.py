"""One job from several files and from ``--set``: later files are merged over earlier ones, then values are set.

Files merge as JSON merge patches do (RFC 7396): mappings field by field, null removes a field, everything else, lists
too, is replaced as a whole.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from polyreme.job_files import JobLoader, read_documents, the_document
from polyreme_api.errors import InvalidConfigError
from polyreme_api.job import TrainingJob
from polyreme_planner.loading import load_job

OPTION = "--set"
_NAME = r'[A-Za-z_][\w/-]*|"[^"]+"'
_PATH = re.compile(rf"({_NAME})(\[[0-9]{{1,4}}\]|\.({_NAME}))*")
_PART = re.compile(rf"{_NAME}|\[[0-9]+\]")
_ROOTS = ("metadata", "spec")
"""Fields of the manifest that a path may begin with; all other paths are below spec."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """A field and its new value; None removes the field."""

    path: tuple[str | int, ...]
    """Names and indices, from the top of the manifest."""
    value: Any
    text: str
    """The value as it was typed."""

    @property
    def field(self) -> str:
        """The field, as errors name it: ``spec.data.sources[0].weight``."""
        return _written(self.path)


def read_manifest(files: Sequence[Path], settings: Sequence[str] = ()) -> Any:
    """Read the manifest of one job.

    Args:
        files: Files with one document each; each is merged over the ones before.
        settings: Values of ``--set``, in order.

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: If a file or a setting can't be read. Whether the job is right is checked by its parser.
    """
    return combined([the_document(read_documents(path), path) for path in files], files, settings)


def load_merged(files: Sequence[Path], settings: Sequence[str] = ()) -> TrainingJob:
    """Load the job of ``read_manifest``, and refuse one that no plan fits.

    Raises:
        NotFoundError: If there is no such file.
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    return load_job(read_manifest(files, settings))


def combined(documents: Sequence[Any], files: Sequence[Path], settings: Sequence[str]) -> Any:
    """Merge the documents of files and set values in the result; the documents stay as they are.

    Raises:
        InvalidConfigError: As ``read_manifest``.
    """
    manifest = documents[0]
    for path, document in zip(files, documents, strict=True):
        if not isinstance(document, Mapping) and (settings or len(files) > 1):
            raise InvalidConfigError(
                f"{path} can't be merged: {type(document).__name__}, expected a mapping", field="the file"
            )
    for document in documents[1:]:
        manifest = merged(manifest, document)
    for text in settings:
        manifest = with_setting(manifest, parse_setting(text))
    return manifest


def merged(earlier: Any, later: Any) -> Any:
    """Merge one value over another, as a JSON merge patch."""
    if not isinstance(later, Mapping):
        return later
    fields = dict(earlier) if isinstance(earlier, Mapping) else {}
    for name, value in later.items():
        if value is None:
            fields.pop(name, None)
        else:
            fields[name] = merged(fields.get(name), value)
    return fields


def parse_setting(text: str) -> Setting:
    """Read ``PATH=VALUE``.

    Raises:
        InvalidConfigError: If it has another form.
    """
    path, typed = _split(text)
    loader = _ValueLoader(typed)
    try:
        return _setting(loader, path, _node(loader))
    except (yaml.YAMLError, ValueError) as error:
        raise _no_yaml(text, error) from error


def parse_settings(text: str) -> list[Setting]:
    """Read ``PATH=VALUE,VALUE``: a setting for each value.

    Raises:
        InvalidConfigError: If it has another form.
    """
    path, typed = _split(text)
    loader = _ValueLoader(f"[{typed}]")
    try:
        return [_setting(loader, path, node) for node in _node(loader).value]
    except (yaml.YAMLError, ValueError) as error:
        raise _no_yaml(text, error) from error


def with_setting(manifest: Any, setting: Setting) -> Any:
    """Return a manifest with a field set or removed; mappings on the way are made, lists must be there.

    Raises:
        InvalidConfigError: If the path goes through what is no mapping, or beyond the end of a list.
    """
    return _changed(manifest, setting, 0)


def _changed(value: Any, setting: Setting, depth: int) -> Any:
    # Nothing is changed in place: by an anchor of YAML, several fields may hold one object.
    if depth == len(setting.path):
        return setting.value
    part, here = setting.path[depth], _written(setting.path[:depth])
    if isinstance(part, int):
        entries = value if isinstance(value, list) else []
        if part >= len(entries):
            there = f"entries 0 to {len(entries) - 1}" if entries else "no entries"
            raise InvalidConfigError(f"{setting.field} can't be set: {here} has {there} in the manifest", field=OPTION)
        return [*entries[:part], _changed(entries[part], setting, depth + 1), *entries[part + 1 :]]
    if value is not None and not isinstance(value, Mapping):
        raise InvalidConfigError(
            f"{setting.field} can't be set: {here} is {value!r:.80}, which has no fields", field=OPTION
        )
    fields = dict(value or {})
    if depth == len(setting.path) - 1 and setting.value is None:
        fields.pop(part, None)
    else:
        fields[part] = _changed(fields.get(part), setting, depth + 1)
    return fields


class _ValueLoader(JobLoader):
    """Reads values: a number with a fraction stays the text that was typed, since no field of the API is a float."""

    def construct_decimal(self, node: yaml.ScalarNode) -> str:
        """Return the text of a number with a fraction."""
        return str(self.construct_scalar(node))


_ValueLoader.add_constructor("tag:yaml.org,2002:float", _ValueLoader.construct_decimal)


def _split(text: str) -> tuple[tuple[str | int, ...], str]:
    path, found, typed = text.partition("=")
    path, typed = path.strip(), typed.strip()
    if not found or not typed or not _PATH.fullmatch(path):
        raise InvalidConfigError(
            f"{OPTION} is refused: {text!r}, expected PATH=VALUE with a path below spec, such as training.steps=200 or "
            "data.sources[0].weight=2; null as the value removes the field",
            field=OPTION,
        )
    parts = [int(part[1:-1]) if part.startswith("[") else part.strip('"') for part in _PART.findall(path)]
    return (*([] if parts[0] in _ROOTS else ["spec"]), *parts), typed


def _node(loader: _ValueLoader) -> yaml.Node:
    node = loader.get_single_node()
    if node is None:
        raise yaml.YAMLError("there is only a comment")
    return node


def _setting(loader: _ValueLoader, path: tuple[str | int, ...], node: yaml.Node) -> Setting:
    value = loader.construct_object(node, deep=True)
    if not isinstance(node, yaml.ScalarNode):
        return Setting(path=path, value=value, text=json.dumps(value, default=str))
    if value is not None and not isinstance(value, str) and _is_text(path):
        value = node.value
    return Setting(path=path, value=value, text=node.value)


def _no_yaml(text: str, error: Exception) -> InvalidConfigError:
    words = " ".join(str(error).replace('in "<unicode string>", ', "in ").split())
    return InvalidConfigError(f"{OPTION} {text}: the value is not YAML: {words}", field=OPTION)


def _is_text(path: Sequence[str | int]) -> bool:
    """Tell whether a field takes text alone, as all decimals do: what is typed for it is never a number."""
    schema = TrainingJob.model_json_schema(by_alias=True)
    places = list(_variants(schema, schema))
    for part in path:
        places = [variant for place in places for inner in _inner(place, part) for variant in _variants(inner, schema)]
    return {place.get("type") for place in places} - {"null"} == {"string"}


def _inner(place: Mapping[str, Any], part: str | int) -> Iterator[Mapping[str, Any]]:
    found = place.get("items") if isinstance(part, int) else place.get("properties", {}).get(part)
    if found is None and not isinstance(part, int):
        found = place.get("additionalProperties")
    if isinstance(found, Mapping):
        yield found


def _variants(place: Mapping[str, Any], schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Yield what a field may be, references followed."""
    if "$ref" in place:
        yield from _variants(schema["$defs"][place["$ref"].rpartition("/")[2]], schema)
    elif "anyOf" in place:
        for variant in place["anyOf"]:
            yield from _variants(variant, schema)
    else:
        yield place


def _written(path: Sequence[str | int]) -> str:
    words = (f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
    return "".join(words).removeprefix(".")
