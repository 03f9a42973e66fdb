"""Batches that the loader hands to the trainer: packs of a fixed token count, as plain arrays.

Shape suffixes in this file:
    T = tokens (packs x tokens a pack), P = patches of all images, C = values of one patch (channels x side x side),
    D = documents, I = images, B = branches of documents, N = pairs
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

IGNORED_TARGET = -100
"""Target of a token that adds nothing to the loss."""


class Array(Protocol):
    """The part of a NumPy array that crosses a plane's border."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Extent of each dimension."""
        ...

    def __array__(self) -> Any:
        """Return the data as a NumPy array."""
        ...


class _NoBranches:
    """An empty int64 [B, 4], which NumPy reads by its array interface: this package does without NumPy."""

    shape = (0, 4)
    __array_interface__: Mapping[str, Any] = {"version": 3, "shape": shape, "typestr": "<i8", "data": (0, False)}


NO_BRANCHES = cast(Array, _NoBranches())


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PackedBatch:
    """Some packs of one step, concatenated along T."""

    tokens_T: Array
    """int64 token ids."""
    targets_T: Array
    """int64 token ids that follow, already shifted within each document; ``IGNORED_TARGET`` where masked."""
    positions_T: Array
    """int64 position within the document; within a branch, as if the other branches were not there."""
    document_offsets: Array
    """int32, D + 1 offsets into T, from 0 to T; a pack's padding is a document of its own."""
    patches_PC: Array
    """uint8 pixels, which the model normalises on its device, channel-major within a patch, patches row-major within an
    image; float32 ones are normalised already."""
    grids_I2: Array
    """int32 rows and columns of each image [patches], in the order in which their tokens stand in T."""
    sample_ids: Sequence[str]
    """Samples of the real documents, in order."""
    unmasked_tokens: int
    """Targets of these packs that are not masked."""
    lost_images: Sequence[int] = ()
    """Images that the index has in these packs and that are not here, since their sample is damaged: their numbers,
    rising, among all that the index has."""
    padding_documents: Sequence[int] = ()
    """Documents, by their number in ``document_offsets``, that are padding: what is left of a pack, null packs, and
    placeholders of damaged samples. No expert takes their tokens, and no statistics count them."""
    branches_B4: Array = NO_BRANCHES
    """int64, a row for each branch in the order of T: its document's number in ``document_offsets``, its first token in
    T, the number of its source in the job's order, and the place of its sample in that source's index.

    A document with branches is a prefix that they share, then the branches. Each begins with the prefix's last token,
    which is repeated for it, so that every place has one target: a token sees the prefix and its own branch. A pair of
    answers has two branches, first the chosen one.
    """


THOUGHT_END = "</think>"
"""Ends the part of an answer that comes before what is answered."""
TEMPLATE_FILE = "polyreme-template.json"
"""Beside a ``tokenizer.json``: the texts around turns and images."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFile:
    """A tokenizer and how images become its tokens, in the form that other programs read."""

    content: bytes
    """``tokenizer.json``."""
    chat_template: str
    """Jinja, as transformers renders it, with one token for each image."""
    template: bytes = b""
    """``TEMPLATE_FILE``, with which the tokenizer can be that of another job; empty: none."""
    image_tokens_max: int
    """Most tokens of one image; larger images are shrunk."""
    pixel_version: int
    """How an image is resized, by the datahub's number."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TokenIds:
    """Special tokens that model and decoding need."""

    media: int
    end: int
    pad: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceSet:
    """A source whose samples are pairs of answers."""

    digest: str
    """Names everything that its tokens and pictures follow from, and the order of its samples."""
    augmented: bool
    """Whether its pictures differ from visit to visit."""


class BatchSource(Protocol):
    """Training data as a pure function of (plan, step)."""

    def packs_in(self, step: int) -> int:
        """Packs that all ranks together train on in a step (steps count from 1)."""
        ...

    def pack_tokens_in(self, step: int) -> int:
        """Tokens of one pack of a step."""
        ...

    @property
    def token_ids(self) -> TokenIds:
        """Special tokens of the tokenizer that made this data."""
        ...

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        """Return packs ``first .. first + count`` of ``step`` (steps count from 1).

        Beyond its last pack are null packs: where data-parallel ranks do not divide the packs of a step, they fill the
        last places.
        """
        ...

    def grids(self, step: int, *, first: int, count: int) -> Sequence[Array]:
        """Return rows and columns of the images of ``count`` packs of ``step`` (int32 [I, 2] each), none of null packs.

        As the index has them, whatever has become of their bytes: no image is read, and all ranks get the same.
        """
        ...

    def patches(self, step: int, *, pack: int, images: Sequence[int]) -> Array:
        """Return the patches [P, C] of some images of a pack of ``step``, by their numbers in ``grids``.

        Those of a damaged sample are zero.
        """
        ...

    def pairs(self, step: int, *, first: int, count: int) -> Array:
        """Return the pairs of ``count`` packs of ``step``: int64 [N, 2], number of the source and place of the sample.

        In the order of ``PackedBatch.branches_B4``, as the index has them: no sample is read, damaged ones are there.
        """
        ...

    @property
    def preference_sets(self) -> Sequence[PreferenceSet | None]:
        """The sources in the job's order; None: its samples are no pairs."""
        ...

    def state(self, step: int) -> Mapping[str, Any]:
        """Return a loader's position after ``step``: some bytes of JSON-able data."""
        ...

    def refresh(self) -> None:
        """Take over changes of the mixture that were fixed since the data were opened.

        They take effect at steps that no rank has read yet. It may be called at any time, and again.
        """
        ...

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse to continue from a state that another dataset or order made.

        Raises:
            RefusedError: Naming the first field that differs.
        """
        ...


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationSample:
    """One held-out question with its expected answer."""

    sample_id: str
    set_name: str = ""
    """Name of the set, in the report."""
    prompt_tokens: Sequence[int]
    """Prompt with its media tokens, up to where the answer begins."""
    patches_PC: Array
    grids_I2: Array
    question: str
    expected: str
    image_digest: str
    """Digest under which the page's picture lies in the lakehouse."""


class EvaluationSource(Protocol):
    """Held-out samples, never trained on."""

    def __len__(self) -> int:
        """Count of samples."""
        ...

    def sample(self, index: int) -> EvaluationSample:
        """Return one sample."""
        ...

    @property
    def set_names(self) -> Sequence[str]:
        """Names of the held-out sets."""
        ...

    @property
    def pack_sets(self) -> Sequence[int]:
        """Which set each held-out pack is of, in the order of the packs."""
        ...

    @property
    def tokens_max(self) -> int:
        """Length of the longest sample [tokens]."""
        ...

    def pack(self, number: int) -> PackedBatch:
        """Return one pack of held-out samples, as long as any trained on; past the last one, an empty pack.

        The source of its branches is the number of its set.
        """
        ...

    @property
    def thought_end(self) -> Sequence[int]:
        """Tokens of ``THOUGHT_END``."""
        ...

    def text(self, tokens: Sequence[int]) -> str:
        """Decode answer tokens to text, without special tokens."""
        ...
