"""What a stage is, and the parameters that enter its key."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from polyreme_datahub.registry.work import SampleRow

INGEST, DECODE, COMPOSE, TOKENIZE, INDEX = "ingest", "decode", "compose", "tokenize", "index"
STAGES = (INGEST, DECODE, COMPOSE, TOKENIZE, INDEX)
CHUNK = 256
"""Samples of one message."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ImageParameters:
    """How images become patches; part of every key after decode."""

    patch_px: int
    merge: int
    image_tokens_max: int
    """Most language-model tokens of one image from files; larger images are shrunk."""

    @property
    def token_px(self) -> int:
        """Side of the square that becomes one token [pixels]."""
        return self.patch_px * self.merge


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One sample at one stage."""

    row: SampleRow
    key: str
    """Key of the action."""
    inputs: tuple[str, ...]
    """Digests of what the operation reads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What an operation made."""

    output: bytes
    parts: Sequence[bytes] = ()
    """Further bytes that ``output`` names by digest."""


class Operation(Protocol):
    """A stage between ingest and index."""

    prefix: str
    """Operation, version and parameters, for keys."""

    def compute(self, work: Work, read: Mapping[str, bytes]) -> Result:
        """Make the output of one sample.

        Args:
            work: The sample.
            read: Bytes of its inputs by digest, and of what ``needs`` named.

        Raises:
            BadRecordError: If the sample breaks a rule.
        """
        ...

    def needs(self, inputs: Sequence[bytes]) -> Iterable[str]:
        """Name further digests that the inputs refer to."""
        ...
