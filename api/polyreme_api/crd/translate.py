"""From pydantic's JSON schema to a structural one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from polyreme_api.crd.rules import LIST_KEYS, RULES, Rule

Schema: TypeAlias = dict[str, Any]

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


def schema_of(model: type[BaseModel], *, with_defaults: bool, mode: Literal["validation", "serialization"]) -> Schema:
    """Translate a type: a spec as it is read, with its defaults; a status as it is written, without."""
    document = model.model_json_schema(by_alias=True, mode=mode)
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
        if written := [name for name in schema.get("required", ()) if not source["properties"][name].get("readOnly")]:
            schema["required"] = written
        else:
            schema.pop("required", None)
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
            # A type often says more of itself than the field that holds it: the longer text teaches more.
            told = max(inlined["description"], self._own(source).get("description", ""), key=len)
            return {**inlined, **self._own(source), "description": told}
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
            schema["default"] = default_of(schema)
        return schema

    def _own(self, source: Schema) -> Schema:
        own = {key: source[key] for key in _KEPT if key in source}
        if not self.with_defaults or own.get("default", ...) is None:
            own.pop("default", None)
        if "description" in own:
            own["description"] = plain_text(own["description"])
        return own


def default_of(schema: Schema) -> Schema:
    """Return an object's default: empty, as the server fills it; written out where rules must hold of it."""
    if "x-kubernetes-validations" not in schema:
        return {}
    return {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner}


def freeze(schema: Schema, *, mutable: frozenset[str], path: str = "") -> None:
    """Add rules that keep every field as it was, except ``mutable`` ones.

    A field's own rule runs only while it is there before and after; that it neither comes nor goes is its owner's rule.
    """
    owned = []
    for name, inner in schema["properties"].items():
        place = f"{path}{name}"
        if place in mutable:
            continue
        if "default" not in inner and name not in schema.get("required", ()):
            owned.append(_stays(name, inner, place))
        if "properties" in inner:
            freeze(inner, mutable=mutable, path=f"{place}.")
        else:
            inner.setdefault("x-kubernetes-validations", []).append(_unchanged(inner, place))
    if owned:
        schema.setdefault("x-kubernetes-validations", []).extend(owned)


def _unchanged(schema: Schema, place: str) -> dict[str, str]:
    spoken = " from {oldSelf} to {self}" if _is_scalar(schema) else ""
    return Rule(rule="self == oldSelf", words=_frozen_words(place, spoken), plain=_frozen_words(place)).to_object()


def _stays(name: str, schema: Schema, place: str) -> dict[str, str]:
    said = f"'%s'.format([{{0}}.{name}])" if _is_scalar(schema) else "'something'"
    before, after = (f"has({side}.{name}) ? {said.format(side)} : 'nothing'" for side in ("oldSelf", "self"))
    words = _frozen_words(place, f" from {{{before}}} to {{{after}}}")
    return Rule(rule=f"has(self.{name}) == has(oldSelf.{name})", words=words, plain=_frozen_words(place)).to_object()


def _frozen_words(place: str, spoken: str = "") -> str:
    return f"spec.{place} may not change{spoken} while the job exists; delete the job and create it anew"


def _is_scalar(schema: Schema) -> bool:
    return schema["type"] in {"string", "integer", "boolean"}


def plain_text(docstring: str) -> str:
    """Write a docstring as one line of plain text."""
    return " ".join(docstring.replace("``", "`").split())
