"""The commit marker: the file whose presence makes a checkpoint exist, and the rules by which a reader refuses one.

It holds the checksums of every file beside it, and its own: one flipped bit anywhere in a checkpoint is noticed.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator
from pydantic.alias_generators import to_camel

from polyreme_api.blocks import BLOCK_BYTES, checksums, checksums_of_parts
from polyreme_api.errors import RefusedError
from polyreme_api.history import CHECKPOINT_FORMAT, COMMIT_MARKER, checkpoint_name
from polyreme_api.progress import CheckpointRef


class ForeignFormatError(RefusedError):
    """The checkpoint is whole, but this version does not read its format; to continue without it would lose work."""


class SavedFile(BaseModel):
    """Size of one file and the checksum of each of its blocks."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)

    size_bytes: int = Field(ge=0)
    blocks: tuple[Annotated[int, Field(ge=0, le=0xFFFF_FFFF)], ...]
    """CRC-32 of each ``BLOCK_BYTES`` bytes, in order."""

    @classmethod
    def of(cls, data: bytes | bytearray | memoryview) -> SavedFile:
        """Describe a file that holds ``data``."""
        return cls(size_bytes=memoryview(data).nbytes, blocks=checksums(data))

    @classmethod
    def of_parts(cls, parts: Sequence[bytes | memoryview]) -> SavedFile:
        """Describe a file that holds parts one after the other."""
        return cls(size_bytes=sum(len(part) for part in parts), blocks=checksums_of_parts(parts))

    @model_validator(mode="after")
    def _blocks_cover_the_file(self) -> SavedFile:
        wanted = -(-self.size_bytes // BLOCK_BYTES)
        if len(self.blocks) != wanted:
            raise ValueError(f"{self.size_bytes} bytes have {wanted} blocks, seen {len(self.blocks)} checksums")
        return self


class SavedAdapters(BaseModel):
    """What a checkpoint that holds adapters alone is of."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)

    rank: int
    alpha: float
    targets: tuple[str, ...]
    base: str
    """Digest of the frozen weights that they were trained beside."""


class SavedHeldOut(BaseModel):
    """The held-out losses by which a run may end early."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    lowest: float | None = None
    """Lowest loss of all sets; None: none was measured."""
    lowest_step: int = Field(default=0, ge=0)
    misses: int = Field(default=0, ge=0)
    """Measurements since then."""


class SavedLossHistory(BaseModel):
    """The figures by which the next steps are judged, and the steps that were skipped."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    losses: tuple[float, ...] = ()
    gradient_norms: tuple[float, ...] = ()
    update_norms: tuple[float, ...] = Field(default=(), exclude_if=lambda norms: not norms)
    """Of the steps in which they are measured."""
    in_a_row: int = Field(default=0, ge=0)
    skipped: tuple[int, ...] = ()
    held_out: SavedHeldOut = Field(default=SavedHeldOut(), exclude_if=lambda held_out: held_out == SavedHeldOut())


class CommitMarker(BaseModel):
    """``COMMIT.json``."""

    model_config = ConfigDict(frozen=True, extra="ignore", alias_generator=to_camel, populate_by_name=True)

    format: int = CHECKPOINT_FORMAT
    attempt: int = Field(ge=1)
    step: int = Field(ge=0)
    world: int = Field(ge=1)
    """Ranks that saved it."""
    model_digest: str
    model_shape: dict[str, Any]
    """The model's sizes, so that a refusal can name the one that differs."""
    plan_hash: str
    """Hash of the plan by which the ranks were laid out."""
    plan: dict[str, Any] = Field(default_factory=dict)
    """That plan, for people: a load asks nothing of it, since any layout reads what any other wrote."""
    files: dict[str, SavedFile]
    adapters: SavedAdapters | None = Field(default=None, exclude_if=lambda adapters: adapters is None)
    """None if it holds the whole model."""
    steps_before: int = Field(default=0, ge=0, exclude_if=lambda steps: not steps)
    """Steps of earlier runs in which the optimizer's moments learned, beside those of this one."""
    loss_history: SavedLossHistory | None = Field(default=None, exclude_if=lambda history: history is None)
    """None in a checkpoint of an earlier release."""
    held_out_loss: float | None = Field(default=None, exclude_if=lambda loss: loss is None)
    """Of all sets, measured after ``step``; None where it was not."""
    loader: dict[str, Any]
    """State of the data source after ``step``."""
    committed_at_s: float

    @property
    def reference(self) -> CheckpointRef:
        """Which checkpoint it commits."""
        return CheckpointRef(attempt=self.attempt, step=self.step)

    @property
    def name(self) -> str:
        """Name of that checkpoint under its root."""
        return checkpoint_name(self.reference)


def seal(marker: CommitMarker) -> bytes:
    """Write a marker with its own checksum, as ``parse_marker`` reads it."""
    data = marker.model_dump(mode="json", by_alias=True)
    return json.dumps({**data, "checksum": _own_checksum(data)}, indent=1).encode()


def parse_marker(text: bytes, *, name: str) -> CommitMarker:
    """Read a marker.

    Args:
        text: Content of the file.
        name: The checkpoint's name, for messages.

    Raises:
        ForeignFormatError: If it is of a format that this version does not read.
        RefusedError: If it is damaged.
    """
    try:
        data = json.loads(text)
        version = data.pop("format")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _damaged(name, "expected JSON with a format") from error
    if version != CHECKPOINT_FORMAT:
        raise ForeignFormatError(
            f"checkpoint has another format: {name} has format {version!r}, this version reads {CHECKPOINT_FORMAT}; "
            "continue with the version of polyreme that wrote it, or export it with that version and start a new run"
        )
    said = data.pop("checksum", None)
    seen = _own_checksum({"format": version, **data})
    if said != seen:
        raise _damaged(name, f"its content has crc32 {seen}, expected {said}")
    try:
        marker = CommitMarker.model_validate({"format": version, **data})
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise _damaged(name, f"field {field} does not fit") from error
    if checkpoint_name(marker.reference) != name:
        raise _damaged(name, f"it belongs to {checkpoint_name(marker.reference)}")
    return marker


def _own_checksum(data: Mapping[str, Any]) -> str:
    """Checksum of the content, however it is laid out as text."""
    return f"{zlib.crc32(json.dumps(data, sort_keys=True, separators=(',', ':')).encode()):08x}"


def _damaged(name: str, why: str) -> RefusedError:
    return RefusedError(f"checkpoint marker is damaged: {name}/{COMMIT_MARKER}, {why}")
