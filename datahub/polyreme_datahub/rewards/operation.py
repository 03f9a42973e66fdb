"""The operation that calls a reward function, in a sandbox's child."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import RECORD, operation
from polyreme_datahub.operations.values import Value

RULE = "reward"
TEXTS = ("answer", "expected", "prompt")
"""Arguments that every reward function takes."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RewardParameters:
    """Which function, and its further arguments."""

    function: str
    arguments: Mapping[str, str] = dataclasses.field(default_factory=dict)


@operation("reward", 1, inputs=(RECORD,), parameters=RewardParameters)
def reward(record: Value, parameters: RewardParameters) -> Value:
    """Reward the answer of a record; an empty one asks whether the function is there and takes the arguments."""
    function = _function(parameters.function)
    if not record.data:
        _check_arguments(function, parameters)
        return Value.of({})
    given = function(**record.data, **parameters.arguments)
    if isinstance(given, bool) or not isinstance(given, (int, float)) or not math.isfinite(given):
        raise BadRecordError(f"{parameters.function} returned {given!r}, expected a finite number", rule=RULE)
    return Value.of({"reward": float(given)})


def _check_arguments(function: Callable[..., Any], parameters: RewardParameters) -> None:
    if twice := sorted(parameters.arguments.keys() & set(TEXTS)):
        raise BadRecordError(f"rewardArguments name {twice[0]!r}, which every function is given anyway", rule=RULE)
    try:
        inspect.signature(function).bind(**dict.fromkeys(TEXTS, ""), **parameters.arguments)
    except TypeError as error:
        given = ", ".join((*TEXTS, *parameters.arguments))
        raise BadRecordError(
            f"{parameters.function} can't be called with {given} by name ({error}); change it, or rewardArguments",
            rule=RULE,
        ) from error


@functools.cache
def _function(path: str) -> Callable[..., Any]:
    module, _, name = path.partition(":")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise BadRecordError(
            f"{path} can't be imported ({error}); its module must be on the path where ranks run", rule=RULE
        ) from error
    if not callable(found):
        raise BadRecordError(f"{path} is a {type(found).__name__}, expected a function", rule=RULE)
    return cast("Callable[..., Any]", found)
