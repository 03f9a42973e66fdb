"""From YAML or a cluster's object to a TrainingJob, with one clear message for whatever is wrong."""

import difflib
from collections.abc import Mapping
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic.alias_generators import to_camel

from polyreme_api.errors import InvalidConfigError
from polyreme_api.job.spec import TrainingJob

_SHOWN_MAX = 80


def load_job(document: object) -> TrainingJob:
    """Read a job as a user wrote it, and refuse what no plan fits.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    job = parse_job(document)
    from polyreme_api.plan.plan import plan_for  # the plan reads job types, so it can't be imported above

    plan_for(job.spec)
    return job


def parse_job(document: object) -> TrainingJob:
    """Read a job's structure, without planning it.

    Raises:
        InvalidConfigError: Naming the field, the value seen and the rule.
    """
    if not isinstance(document, Mapping):
        raise InvalidConfigError(
            f"no TrainingJob: a {type(document).__name__}, rule a mapping with apiVersion, kind, metadata, spec"
        )
    try:
        return TrainingJob.model_validate(document)
    except ValidationError as error:
        raise _translate(error) from error


def _translate(error: ValidationError) -> InvalidConfigError:
    # A misspelt required field is both unknown and missing: the misspelling is what to mend.
    first = min(error.errors(include_url=False), key=lambda found: found["type"] != "extra_forbidden")
    path = [str(part) for part in first["loc"]]
    field = ".".join(path) or "the job"
    more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
    if first["type"] == "extra_forbidden":
        known = _fields_at(path[:-1])
        near = difflib.get_close_matches(path[-1], known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known fields are {', '.join(sorted(known))}"
        return InvalidConfigError(f"unknown field: {field}, {hint}{more}", field=field)
    if first["type"] == "missing":
        return InvalidConfigError(f"field missing: {field} is required{more}", field=field)
    seen = repr(first["input"])
    seen = seen if len(seen) <= _SHOWN_MAX else seen[: _SHOWN_MAX - 1] + "…"
    rule = first["msg"].removeprefix("Value error, ")
    if isinstance(first["input"], Mapping | BaseModel):
        return InvalidConfigError(f"{field} is refused: {rule}{more}", field=field)
    return InvalidConfigError(f"{field} is refused: {seen}, rule: {rule[:1].lower()}{rule[1:]}{more}", field=field)


def _fields_at(path: list[str]) -> list[str]:
    model: Any = TrainingJob
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
