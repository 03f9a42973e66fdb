"""Rows of the registry with a flow's results, as values."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol, TypeVar

from polyreme_datahub.lakehouse import Artifact

VALUE_BYTES_MAX = 2000
"""Most bytes of an output that is stored in its action's row."""
INPUTS_MAX = 1000
"""Most inputs of one action."""
ERROR_CHARACTERS_MAX = 2000
ADDRESS = re.compile(r"(?: at)? 0x[0-9a-fA-F]{6,}")
ID_CHARACTERS_MAX = 1024
"""Of a dead letter: names of files may be longer than any id that is accepted."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SampleRow:
    """An ingested record of a version."""

    ordinal: int
    sample_id: str
    record: str
    """Digest of the record's canonical form."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """What an operation made of its inputs."""

    key: str
    operation: str
    inputs: tuple[str, ...]
    """Digests, in the order of the operation's arguments."""
    output: str
    value: str | None = None
    """The output itself, canonical JSON of at most ``VALUE_BYTES_MAX`` bytes; None if it lies in the lakehouse."""

    def __post_init__(self) -> None:
        """Refuse what a row can't hold.

        Raises:
            ValueError: If the inline value or the number of inputs is above its maximum.
        """
        if self.value is not None and len(self.value.encode()) > VALUE_BYTES_MAX:
            raise ValueError(
                f"action {self.key}: inline value has {len(self.value.encode())} bytes, expected at most "
                f"{VALUE_BYTES_MAX}; store it in the lakehouse"
            )
        if len(self.inputs) > INPUTS_MAX:
            raise ValueError(f"action {self.key} has {len(self.inputs)} inputs, expected at most {INPUTS_MAX}")


class Output(NamedTuple):
    """Output of an action that is known."""

    digest: str
    value: str | None
    """The output itself if it is stored in the row."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Letter:
    """A dead letter: a record that broke a rule."""

    key: str
    """Digest of the failed action and the ordinal: the same bytes fail the same way, and each record has its letter."""
    operation: str
    ordinal: int
    sample_id: str
    rule: str
    error: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """A sample that a filter or a barrier dropped on purpose."""

    key: str
    """As the key of a dead letter."""
    operation: str
    ordinal: int
    sample_id: str
    reason: str


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OperationCount:
    """Outcomes of an operation."""

    operation: str
    hits: int = 0
    misses: int = 0
    dead: int = 0
    dropped: int = 0

    def __add__(self, other: OperationCount) -> OperationCount:
        """Add the outcomes of the same operation."""
        return OperationCount(
            operation=self.operation,
            hits=self.hits + other.hits,
            misses=self.misses + other.misses,
            dead=self.dead + other.dead,
            dropped=self.dropped + other.dropped,
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class IndexRow:
    """A finished index."""

    key: str
    """Digest of (version, image parameters, tokenizer, sequence length)."""
    version_id: int
    manifest: str
    samples: int
    tokens: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """Everything that follows from work on one version; committed in one transaction."""

    version_id: int
    samples: Sequence[SampleRow] = ()
    artifacts: Sequence[Artifact] = ()
    actions: Sequence[Action] = ()
    letters: Sequence[Letter] = ()
    drops: Sequence[Drop] = ()
    counts: Sequence[OperationCount] = ()
    indexes: Sequence[IndexRow] = ()
    reused: Sequence[str] = ()
    """Digests of artifacts that were found and not made: garbage collection keeps them too."""
    blobs: Mapping[str, int] = dataclasses.field(default_factory=dict)
    """Further blobs that these results name (manifests, shards), with their bytes."""
    removed: Sequence[int] = ()
    """Ordinals whose samples a barrier removes (a doubled id); their letter or drop says why."""


def storable(text: str) -> str:
    """Escape what no database takes: half surrogates, and NUL, which PostgreSQL refuses."""
    return text.encode("utf-8", "backslashreplace").decode().replace("\0", "\\x00")


def without_addresses(text: str) -> str:
    """Leave out addresses of objects (``<BytesIO object at 0x7f...>``): the same failure has the same text."""
    return ADDRESS.sub("", text)


def columns(row: Any) -> dict[str, Any]:
    """Return a flat value as a row (``dataclasses.asdict`` would copy deeply)."""
    return {name: getattr(row, name) for name in row.__slots__}


class _Flat(Protocol):
    __dataclass_fields__: ClassVar[dict[str, Any]]


_Value = TypeVar("_Value", bound=_Flat)


def value_of(kind: type[_Value], row: Any) -> _Value:
    """Read a flat value from a row that has its fields, and perhaps others."""
    return kind(**{name: getattr(row, name) for name in kind.__dataclass_fields__})
