"""The commit marker: the file whose presence makes a checkpoint exist, and the rules by which a reader refuses one."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.alias_generators import to_camel

from polyreme_api.errors import RefusedError
from polyreme_api.history import CHECKPOINT_FORMAT, COMMIT_MARKER
from polyreme_api.plan.plan import shape_digest
from polyreme_api.plan.shapes import ModelShape


class ForeignFormatError(RefusedError):
    """The checkpoint is whole, but of a format that this version does not read; going on without it would lose work."""


class SavedFile(BaseModel):
    """Size and digest of one file."""

    model_config = ConfigDict(frozen=True, alias_generator=to_camel, populate_by_name=True)

    size_bytes: int = Field(ge=0)
    sha256: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


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
    files: dict[str, SavedFile]
    loader: dict[str, Any]
    """State of the data source after ``step``."""
    committed_at_s: float


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
        version = data["format"]
    except (ValueError, KeyError, TypeError) as error:
        raise RefusedError(
            f"checkpoint marker is damaged: {name}/{COMMIT_MARKER}, it must be JSON with a format"
        ) from error
    if version != CHECKPOINT_FORMAT:
        raise ForeignFormatError(
            f"checkpoint has another format: {name} has format {version!r}, this version reads {CHECKPOINT_FORMAT}; "
            "go on with the version of polyreme that wrote it, or export it there and start a new run"
        )
    try:
        return CommitMarker.model_validate(data)
    except ValidationError as error:
        field = ".".join(str(part) for part in error.errors()[0]["loc"])
        raise RefusedError(
            f"checkpoint marker is damaged: {name}/{COMMIT_MARKER}, field {field} does not fit"
        ) from error


def check_model(marker: CommitMarker, shape: ModelShape, *, name: str) -> None:
    """Refuse a checkpoint of another model.

    Raises:
        RefusedError: Naming the first size that differs.
    """
    if marker.model_digest == shape_digest(shape):
        return
    saved, wanted = _leaves(marker.model_shape), _leaves(dataclasses.asdict(shape))
    for field in sorted(saved.keys() | wanted.keys()):
        if saved.get(field) != wanted.get(field):
            raise RefusedError(
                f"checkpoint is of another model: {name} has {field}={saved.get(field)!r}, "
                f"this run has {wanted.get(field)!r}",
                field=f"spec.model ({field})",
            )
    raise RefusedError(f"checkpoint is of another model: {name} has digest {marker.model_digest!r}", field="spec.model")


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping):
            flat.update(_leaves(value, f"{prefix}{name}."))
        else:
            flat[f"{prefix}{name}"] = value
    return flat
