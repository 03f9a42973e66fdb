"""Field types that our kinds share: bounded text, decimals as text, conditions, the bases of spec and status."""

import re
from decimal import Decimal as _Decimal
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema
from pydantic.alias_generators import to_camel

STEPS_MAX = 100_000_000
REPLICAS_MAX = 15_000
DEVICES_MAX = 64
SECONDS_MAX = 31_536_000


class Part(BaseModel):
    """Base of every part of the spec: camelCase names, unknown fields refused, values frozen."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        alias_generator=to_camel,
        populate_by_name=True,
        strict=True,
    )


class StatusPart(BaseModel):
    """Base of the parts of a status: camelCase names, unknown fields of newer versions ignored, values frozen."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)


MESSAGE_CHARACTERS_MAX = 1024
"""Characters of a message in a status; a longer one ends with an ellipsis."""


def bounded_message(text: Any) -> Any:
    """Cut a message to its bound, and replace what can't be written as UTF-8; anything but text is left alone."""
    if not isinstance(text, str):
        return text
    if len(text) > MESSAGE_CHARACTERS_MAX:
        text = f"{text[: MESSAGE_CHARACTERS_MAX - 1]}…"
    return text.encode(errors="replace").decode()


Message = Annotated[str, BeforeValidator(bounded_message)]
"""A sentence in a status. The type bounds it, so that no writer of a status can forget to."""

Time = Annotated[str, Field(max_length=32)]
"""RFC 3339, or empty while it is not known."""


class Condition(StatusPart):
    """A condition by KEP-1623."""

    type: Annotated[str, Field(max_length=316)]
    """Type of the condition."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: Annotated[str, Field(min_length=1, max_length=1024)]
    """Why, one of a finite set (docs/reference/reasons.md)."""
    message: Annotated[Message, Field(max_length=32_768)] = ""
    """Why, for people."""
    last_transition_time: Time = ""
    """When ``status`` last changed."""
    observed_generation: int = 0
    """Generation of the spec that this describes."""


def _is_decimal(text: str) -> str:
    if not _Decimal(text).is_finite():
        raise ValueError("not a finite number")
    return text


def _at_most(most: str) -> AfterValidator:
    """Bound a decimal: more is a slip of the exponent."""

    def check(text: str) -> str:
        if _Decimal(text) > _Decimal(most):
            raise ValueError(f"a number up to {most}")
        return text

    return AfterValidator(check)


def _less_than_one(text: str) -> str:
    if _Decimal(text) >= 1:
        raise ValueError("a number from 0 to less than 1")
    return text


def _refuse_number(value: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        raise ValueError(f'a decimal is written as text, in quotes: "{value}" (Kubernetes APIs carry no floats)')
    return value


_DECIMAL = r"^[0-9]+(\.[0-9]+)?([eE][-+]?[0-9]{1,2})?$"
_DECIMAL_CHARACTERS_MAX = 32
DecimalText = Annotated[
    str,
    # First, or its pattern leaves the schema.
    Field(pattern=_DECIMAL, max_length=_DECIMAL_CHARACTERS_MAX),
    BeforeValidator(_refuse_number),
    AfterValidator(_is_decimal),
]
"""A number of zero or more, as text: ``"2e-3"``. Kubernetes APIs carry no floating-point numbers."""

COUNT_MAX = 10_000_000


def _refuse_other_numbers(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | str):
        raise ValueError(
            f'a count is a whole number, and a decimal is written as text, in quotes: "{value}" '
            "(Kubernetes APIs carry no floats)"
        )
    return value


def _is_count_or_decimal(value: int | str) -> int | str:
    if isinstance(value, int) and not 0 <= value <= COUNT_MAX:
        raise ValueError(f"a count is in 0..{COUNT_MAX}")
    if isinstance(value, str) and (len(value) > _DECIMAL_CHARACTERS_MAX or not re.fullmatch(_DECIMAL, value)):
        raise ValueError(f'a decimal of zero or more has at most {_DECIMAL_CHARACTERS_MAX} characters, such as "1e-6"')
    return value


CountOrDecimal = Annotated[
    int | str,
    BeforeValidator(_refuse_other_numbers),
    AfterValidator(_is_count_or_decimal),
    WithJsonSchema(
        {
            "anyOf": [
                {"type": "integer", "minimum": 0, "maximum": COUNT_MAX},
                {"type": "string", "pattern": _DECIMAL, "maxLength": _DECIMAL_CHARACTERS_MAX},
            ]
        }
    ),
]
"""A count, ``16``, or a number of zero or more as text, ``"2.5"``."""

LearningRate = Annotated[DecimalText, _at_most("10")]
"""A learning rate."""
Probability = Annotated[DecimalText, _at_most("1")]
"""A probability."""


def _from_one(text: str) -> str:
    if _Decimal(text) < 1:
        raise ValueError("a number from 1 to 100")
    return text


Temperature = Annotated[DecimalText, _at_most("100"), AfterValidator(_from_one)]
"""Temperature of a mixture."""

Decay = Annotated[DecimalText, AfterValidator(_less_than_one)]
"""Decay of a running mean."""

Coefficient = Annotated[DecimalText, _at_most("1e9")]
"""Any other number of the optimizer."""

_LABEL = r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$"
Name = Annotated[str, Field(pattern=_LABEL, min_length=1, max_length=63)]
"""A DNS label."""

_LABEL_OR_NONE = r"^([a-z0-9]([-a-z0-9]*[a-z0-9])?)?$"
NameOrNone = Annotated[str, Field(pattern=_LABEL_OR_NONE, max_length=63)]
"""A DNS label, or empty."""

_QUALIFIED = r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?/)?[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?$"
ResourceName = Annotated[str, Field(pattern=_QUALIFIED, min_length=1, max_length=317)]
"""A resource as nodes and containers name it, ``nvidia.com/gpu``."""

LabelKey = Annotated[str, Field(pattern=_QUALIFIED, min_length=1, max_length=317)]
"""Key of a node's label, ``topology.kubernetes.io/zone``."""

Amount = Annotated[int, Field(ge=0, le=2**53 - 1)]
"""A count, exact in every reader of JSON."""

_DATASET = r"^[a-z0-9]([-a-z0-9./]*[a-z0-9])?(@([0-9]+|[a-z][-a-z0-9.]{0,62}))?$"
DatasetReference = Annotated[str, Field(pattern=_DATASET, min_length=1, max_length=253)]
"""``name``, ``name@version`` or ``name@tag``; names under ``sample/`` are the data sets that polyreme brings along."""

Url = Annotated[str, Field(min_length=1, max_length=1024)]
_CHECKPOINT = r"^(file|s3)://.+/a[0-9]{6,7}-s[0-9]{8,9}/?$"
CheckpointUrl = Annotated[str, Field(pattern=_CHECKPOINT, max_length=1024)]
"""A checkpoint: the URL of its root, and its name."""
_FUNCTION = r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)*:[A-Za-z_][A-Za-z0-9_]*$"
FunctionPath = Annotated[str, Field(pattern=_FUNCTION, max_length=256)]
"""A Python function, as ``package.module:function``."""
Text = Annotated[str, Field(max_length=1024)]
Seconds = Annotated[int, Field(ge=0, le=SECONDS_MAX)]

PATTERN_WORDS = {
    _DECIMAL: 'must be a number of 0 or more, such as "2e-3"',
    _FUNCTION: "must be package.module:function",
    _LABEL: 'must be lower-case letters, digits and "-", such as "run-7"',
    _LABEL_OR_NONE: 'must be lower-case letters, digits and "-", such as "run-7", or empty',
    _QUALIFIED: 'must be a qualified name, such as "nvidia.com/gpu" or "topology.kubernetes.io/zone"',
    _CHECKPOINT: 'must be the URL of a root and the name of a checkpoint, such as "s3://b/run-7/a000001-s00000180"',
    _DATASET: 'must be "name", "name@version" or "name@tag", of lower-case letters, digits, "-", "." and "/"',
}
"""What each pattern asks for, for people."""
