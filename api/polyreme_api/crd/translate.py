"""From pydantic's JSON schema to a structural one."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, Literal, TypeAlias

from pydantic import BaseModel

from polyreme_api.crd.descriptions import DescribedSchema
from polyreme_api.crd.pod_template import KEEPS_UNKNOWN, pod_template_schema
from polyreme_api.crd.rule import Rule
from polyreme_api.crd.rules import ATOMIC, LIST_KEYS, RULES
from polyreme_api.pod_template import FORMAT

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


_SIZE = "size(dyn(self))"
"""How many fields an object has, in CEL, which counts no fields of what it knows to be an object."""


def schema_of(
    model: type[BaseModel],
    *,
    with_defaults: bool,
    mode: Literal["validation", "serialization"],
    unfilled: frozenset[str] = frozenset(),
) -> Schema:
    """Translate a type: a spec as it is read, with its defaults; a status as it is written, without.

    Args:
        model: The type.
        with_defaults: Whether the API server fills defaults.
        mode: Pydantic's schema of what is read, or of what is written.
        unfilled: Fields of the type, parts themselves, into which it fills none where they are left out whole.
    """
    document = model.model_json_schema(by_alias=True, mode=mode, schema_generator=DescribedSchema)
    definitions = {**document.pop("$defs", {}), model.__name__: document}
    translator = _Translator(definitions, with_defaults=with_defaults, unfilled=(model.__name__, unfilled))
    return translator.object(model.__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class _Translator:
    """From pydantic's JSON schema to a structural one, references inlined."""

    definitions: Mapping[str, Schema]
    with_defaults: bool
    unfilled: tuple[str, frozenset[str]]
    """Name of a type, and its fields that have no default."""

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
        for field in self.unfilled[1] if name == self.unfilled[0] else ():
            del schema["properties"][field]["default"]
        for field, key in ((field, key) for (owner, field), key in LIST_KEYS.items() if owner == name):
            schema["properties"][field] |= {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": [key]}
        if name in ATOMIC:
            schema["x-kubernetes-map-type"] = "atomic"
        if rules := RULES.get(name):
            schema["x-kubernetes-validations"] = [self._rule(rule, schema) for rule in rules]
        return schema

    def _rule(self, rule: Rule, schema: Schema) -> dict[str, str]:
        """Translate a rule of an object; one about fields that may be missing is no work where none is there."""
        written = rule.to_object()
        if not rule.of_optional:
            return written
        if all(_is_always_there(name, schema) for name in schema["properties"]):
            raise ValueError(f"rule {rule.rule!r} would never be asked: all fields of its object are always there")
        return {**written, "rule": f"{_bare(schema)} || ({rule.rule})"}

    def node(self, source: Schema) -> Schema:
        """Translate any node."""
        if "$ref" in source:
            inlined = self.object(source["$ref"].removeprefix("#/$defs/"))
            # A type often says more of itself than the field that holds it: the longer text teaches more.
            longest = max(inlined["description"], self._own(source).get("description", ""), key=len)
            return {**inlined, **self._own(source), "description": longest}
        if source.get("format") == FORMAT:
            return {**self._own(source), **pod_template_schema()}
        if source.get("additionalProperties") is True:
            return {**self._own(source), KEEPS_UNKNOWN: True}
        if "anyOf" in source:
            return {"x-kubernetes-int-or-string": True} | _of_either(source["anyOf"])
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


def _of_either(choices: Sequence[Schema]) -> Schema:
    """Join the bounds of a whole number and of a text: each holds for values of its own type alone."""
    return {key: bound for choice in choices for key, bound in choice.items() if key != "type"}


def default_of(schema: Schema) -> Schema:
    """Return an object's default: empty, as the server fills it; written out where rules must hold of it."""
    if "x-kubernetes-validations" not in schema:
        return {}
    return {name: inner["default"] for name, inner in schema["properties"].items() if "default" in inner}


def freeze(
    schema: Schema,
    *,
    mutable: frozenset[str],
    append_only: Mapping[str, str] = MappingProxyType({}),
    last_may_change: Mapping[str, str] = MappingProxyType({}),
    path: str = "",
) -> None:
    """Add rules that keep every field as it was, but for those that are named.

    ``mutable`` fields may change, ``append_only`` lists get entries at their end, of ``last_may_change`` lists the last
    entry may change; both are named with the field that orders or names their entries.

    The server runs all of them whenever a status is written, and whenever a rule names a field of an object, it lists
    all fields of that object again. So each value is kept by a rule of its own, which names none; it runs only while
    the value is there before and after. That none comes or goes is a rule of the owner, which looks for fields by name
    only where there are others than those that always are.
    """
    for name, inner in schema["properties"].items():
        place = f"{path}{name}"
        if "properties" in inner and KEEPS_UNKNOWN not in inner:
            freeze(
                inner,
                mutable=mutable,
                append_only=append_only,
                last_may_change=last_may_change,
                path=f"{place}.",
            )
        elif place in last_may_change:
            _add_rule(inner, _kept_but_last(place, last_may_change[place]))
        elif place in append_only:
            _add_rule(inner, _kept_entries(place, append_only[place]))
        elif place not in mutable:
            scalar = _is_scalar(inner)
            words = _frozen_words(place, " from {oldSelf} to {self}" if scalar else "")
            # One sentence, not two: a definition is applied whole, and its size is bounded.
            _add_rule(inner, Rule(rule="self == oldSelf", words=words, values_always=scalar).to_object())
    optional = [name for name in schema["properties"] if not _is_always_there(name, schema)]
    if optional:
        _add_rule(schema, _kept_presence(schema, optional, path))


def _kept_entries(place: str, key: str) -> dict[str, str]:
    """Write the rule that a list, whose entries rise by a field, begins with the entries that it had.

    In one pass: the server bounds the cost of comparing each entry with each other one. Unchanged lists, which every
    write of a status has, are found so at once.
    """
    rule = (
        "self == oldSelf || size(oldSelf) == 0 || "
        f"self.filter(e, e.{key} <= oldSelf[size(oldSelf) - 1].{key}) == oldSelf"
    )
    words = (
        f"spec.{place} may only get more entries while the job exists, with {key} above "
        f"{{oldSelf[size(oldSelf) - 1].{key}}}; keep those that it had, in their order, and append others"
    )
    plain = (
        f"spec.{place} may only get more entries while the job exists, with {key} above that of its last one; keep "
        "those that it had, in their order, and append others"
    )
    return Rule(rule=rule, words=words, plain=plain).to_object()


def _kept_but_last(place: str, key: str) -> dict[str, str]:
    """Write the rule that a list keeps its entries but for what its last one says."""
    others = "{0}.filter(e, e.{1} != {0}[size({0}) - 1].{1})"
    rule = (
        "self == oldSelf || (size(self) > 0 && size(self) == size(oldSelf) && "
        f"self[size(self) - 1].{key} == oldSelf[size(self) - 1].{key} && "
        f"{others.format('self', key)} == {others.format('oldSelf', key)})"
    )
    return Rule(rule=rule, words=f"spec.{place} may change in its last entry only; recreate the job").to_object()


def _kept_presence(schema: Schema, optional: Sequence[str], path: str) -> dict[str, str]:
    """Write the rule that no field of an object comes or goes, with the words for each that might."""
    kept = " && ".join(f"(!has(self.{name}) || has(oldSelf.{name}))" for name in optional)
    rule = f"{_SIZE} == size(dyn(oldSelf)) && ({_bare(schema)} || {kept})"
    part = f"spec.{path}".removesuffix(".")
    plain = f"fields of {part} that have no default may not be added or removed; recreate the job"
    spoken = f"'{plain}'"
    for name in reversed(optional):
        value = "'%s'.format([{0}.{1}])" if _is_scalar(schema["properties"][name]) else "'something'"
        before, after = (f"has({side}.{name}) ? {value.format(side, name)} : 'nothing'" for side in ("oldSelf", "self"))
        words = _frozen_words(f"{path}{name}", f" from {{{before}}} to {{{after}}}")
        changed = Rule(rule="", words=words).to_object()["messageExpression"]
        spoken = f"has(self.{name}) != has(oldSelf.{name}) ? {changed} : {spoken}"
    return {"rule": rule, "message": plain, "messageExpression": spoken}


def _bare(schema: Schema) -> str:
    """Write in CEL that an object has no fields but those that it always has."""
    return f"{_SIZE} == {sum(_is_always_there(name, schema) for name in schema['properties'])}"


def _add_rule(schema: Schema, rule: dict[str, str]) -> None:
    schema.setdefault("x-kubernetes-validations", []).append(rule)


def _is_always_there(name: str, owner: Schema) -> bool:
    return "default" in owner["properties"][name] or name in owner.get("required", ())


def _frozen_words(place: str, spoken: str = "") -> str:
    return f"spec.{place} may not change{spoken}; recreate the job"


def _is_scalar(schema: Schema) -> bool:
    return schema["type"] in {"string", "integer", "boolean"}


def plain_text(docstring: str) -> str:
    """Write a docstring as one line of plain text."""
    return " ".join(docstring.replace("``", "`").split())
