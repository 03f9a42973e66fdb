"""From YAML or a cluster's object to one of our kinds, with one clear message for whatever is wrong."""

import difflib
import re
from collections.abc import Mapping
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from polyreme_api.errors import InvalidConfigError
from polyreme_api.fields import PATTERN_WORDS
from polyreme_api.pod_template import PodTemplateError

_SHOWN_MAX = 80
_BOUND_WORDS = {
    "greater_than_equal": "must be {ge} or more",
    "less_than_equal": "must be {le} or less",
    "literal_error": "must be {expected}",
    "string_too_long": "must have at most {max_length} characters",
    "string_too_short": "must have at least {min_length} characters",
    "too_long": "number of entries must be {max_length} or less",
    "too_short": "number of entries must be {min_length} or more",
    "int_type": "must be a whole number",
    "string_type": "must be text",
    "bool_type": "must be true or false",
    "list_type": "must be a list",
}
"""What a type asks for, by the type of pydantic's error."""
_PATH_AND_RULE = re.compile(r"(?P<path>[a-z]\w*(?:\.[a-z]\w*)*): (?P<rule>.+)", re.DOTALL)
"""A rule across fields begins with the field that it is about."""
Kind = TypeVar("Kind", bound=BaseModel)


def parse_object(document: object, kind: type[Kind], *, context: Mapping[str, Any] | None = None) -> Kind:
    """Read an object of one kind.

    Args:
        document: The object.
        kind: Its type.
        context: Passed to the type's validators.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    if not isinstance(document, Mapping):
        raise InvalidConfigError(
            f"not a {kind.__name__}: {type(document).__name__}, "
            "expected a mapping with apiVersion, kind, metadata, spec"
        )
    try:
        return kind.model_validate(document, context=context)
    except ValidationError as error:
        raise _translate(error, kind) from error


def _translate(error: ValidationError, kind: type[BaseModel]) -> InvalidConfigError:
    # A misspelt required field is both unknown and missing: the misspelling is what to fix.
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    field = ".".join(path) or "the object"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(kind, path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields are {', '.join(sorted(known))}"
        return InvalidConfigError(f"unknown field: {field}, {hint}{more}", field=field)
    if first["type"] == "missing":
        return InvalidConfigError(f"field missing: {field} is required{more}", field=field)
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, PodTemplateError):
        field, count = f"{field}.{cause.field}", error.error_count() + cause.count - 1
        more = f" (and {count - 1} more)" if count > 1 else ""
        return InvalidConfigError(f"{field}: {cause.rule}{more}", field=field)
    seen = repr(first["input"])
    seen = seen if len(seen) <= _SHOWN_MAX else seen[: _SHOWN_MAX - 1] + "…"
    rule = rule_words(first)
    if isinstance(first["input"], Mapping | BaseModel):
        found = _PATH_AND_RULE.fullmatch(rule)
        if found is not None and _is_field(kind, [*path, *found["path"].split(".")]):
            field, rule = ".".join([*path, found["path"]]), found["rule"]
        return InvalidConfigError(f"{field} is refused: {rule}{more}", field=field)
    return InvalidConfigError(f"{field} is refused: {seen}, {rule}{more}", field=field)


def rule_words(error: Mapping[str, Any]) -> str:
    """Say which rule of a type a value broke, of one of pydantic's errors."""
    context = error.get("ctx", {})
    if error["type"] == "string_pattern_mismatch":
        return PATTERN_WORDS.get(context["pattern"], f"must match {context['pattern']}")
    if (words := _BOUND_WORDS.get(error["type"])) is not None:
        return words.format_map(context)
    rule = error["msg"].removeprefix("Value error, ")
    return rule if error["type"] == "value_error" else f"{rule[:1].lower()}{rule[1:]}"


def _is_field(kind: type[BaseModel], path: list[str]) -> bool:
    return path[-1] in _fields_at(kind, path[:-1])


def _fields_at(kind: type[BaseModel], path: list[str]) -> list[str]:
    model: Any = kind
    for part in path:
        if part.isdigit():
            continue
        found = next((info for name, info in model.model_fields.items() if to_camel(name) == part), None)
        if found is None:
            return []
        inner = _model_in(found.annotation)
        if inner is None:
            return []
        model = inner
    return [to_camel(name) for name in model.model_fields]


def _model_in(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    for argument in get_args(annotation):
        if (found := _model_in(argument)) is not None:
            return found
    return None
