"""From pydantic's JSON schema to a structural one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from polyreme_api.crd.rules import ATOMIC, LIST_KEYS, RULES, Rule

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
        if name in ATOMIC:
            schema["x-kubernetes-map-type"] = "atomic"
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
    """Add rules that keep every field as it was, except ``mutable`` ones: one for each part that may not change at all.

    They are few, since the server runs all of them whenever a status is written; which field has changed is found out
    only to say so. A part's rule runs only while it is there before and after; that it neither comes nor goes is its
    owner's rule.
    """
    watched = []
    for name, inner in schema["properties"].items():
        place = f"{path}{name}"
        if place in mutable:
            continue
        if any(other.startswith(f"{place}.") for other in mutable):
            freeze(inner, mutable=mutable, path=f"{place}.")
        elif "properties" not in inner:
            watched.append(_watch(name, schema, f"self.{name}", place))
        else:
            whole = _Watch("self == oldSelf", _changes(inner, "self.", f"{place}."))
            _add_rule(inner, whole, _frozen_words(place))
            if not _is_always_there(name, schema):
                watched.append(_watch_presence(f"self.{name}", inner, place))
    if watched:
        unchanged = " && ".join(f"({each.unchanged})" for each in watched)
        changes = tuple(change for each in watched for change in each.changes)
        may = ", ".join(sorted(other for other in mutable if other.startswith(path)))
        part = f"spec.{path}".removesuffix(".")
        words = f"{part} may not change but for {may} while the job exists; delete the job and create it anew"
        _add_rule(schema, _Watch(unchanged, changes), words)


@dataclasses.dataclass(frozen=True, slots=True)
class _Watch:
    """A rule that something stays as it was, and for each way in which it may not: a rule that fails, and its words."""

    unchanged: str
    changes: tuple[Rule, ...]


def _changes(schema: Schema, seen: str, path: str) -> tuple[Rule, ...]:
    """Return a rule for every field of a part that is the same whole; ``seen`` is how its owner is called in CEL."""
    found: list[Rule] = []
    for name, inner in schema["properties"].items():
        if "properties" in inner and _is_always_there(name, schema):
            found += _changes(inner, f"{seen}{name}.", f"{path}{name}.")
        else:
            found += _watch(name, schema, f"{seen}{name}", f"{path}{name}").changes
    return tuple(found)


def _watch(name: str, owner: Schema, seen: str, place: str) -> _Watch:
    schema, before = owner["properties"][name], _before(seen)
    if not _is_always_there(name, owner):
        presence = _watch_presence(seen, schema, place)
        rule = f"{presence.unchanged} && (!has({seen}) || {seen} == {before})"
        if _is_scalar(schema):
            return _Watch(rule, (Rule(rule=rule, words=presence.changes[0].words),))
        return _Watch(rule, (*presence.changes, Rule(rule=rule, words=_frozen_words(place))))
    spoken = f" from {{{before}}} to {{{seen}}}" if _is_scalar(schema) else ""
    rule = f"{seen} == {before}"
    return _Watch(rule, (Rule(rule=rule, words=_frozen_words(place, spoken)),))


def _watch_presence(seen: str, schema: Schema, place: str) -> _Watch:
    said = "'%s'.format([{0}])" if _is_scalar(schema) else "'something'"
    before, after = (f"has({side}) ? {said.format(side)} : 'nothing'" for side in (_before(seen), seen))
    rule = f"has({seen}) == has({_before(seen)})"
    return _Watch(rule, (Rule(rule=rule, words=_frozen_words(place, f" from {{{before}}} to {{{after}}}")),))


def _before(seen: str) -> str:
    return f"oldSelf{seen.removeprefix('self')}"


def _add_rule(schema: Schema, watch: _Watch, words: str) -> None:
    spoken = f"'{words}'"
    for change in reversed(watch.changes):
        told = change.to_object()
        spoken = f"!({change.rule}) ? {told.get('messageExpression', repr(told['message']))} : {spoken}"
    rule = {"rule": watch.unchanged, "message": words, "messageExpression": spoken}
    schema.setdefault("x-kubernetes-validations", []).append(rule)


def _is_always_there(name: str, owner: Schema) -> bool:
    return "default" in owner["properties"][name] or name in owner.get("required", ())


def _frozen_words(place: str, spoken: str = "") -> str:
    return f"spec.{place} may not change{spoken} while the job exists; delete the job and create it anew"


def _is_scalar(schema: Schema) -> bool:
    return schema["type"] in {"string", "integer", "boolean"}


def plain_text(docstring: str) -> str:
    """Write a docstring as one line of plain text."""
    return " ".join(docstring.replace("``", "`").split())
