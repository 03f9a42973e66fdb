"""Made-up pages and questions for the ranks of these tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from polyreme_api.batch import EvaluationSample, PackedBatch, PreferenceSet, TokenIds
from polyreme_api.errors import RefusedError

MEDIA, END, PAD = 5, 1, 0
VALUES = 3 * 14 * 14
PAIR_STEPS = 3
HELD_OUT_STEP = 5
"""Held-out packs are those of this step, so the held-out loss before it is the loss of it."""


class Pages:
    """Made-up packed pages: a pure function of (step, pack), with images and answers of many sizes.

    ``long`` ones are few and long, three of the first packs' with an image: documents then lie across the cuts of a
    stream, and there are more ranks than images. ``text`` ones have no image. ``packed`` says how many
    packs of how many tokens a step has, by the first step that has them. ``seeing`` is how many packs of a
    step have images at all, and of every ``hole_every`` documents one is a hole: its sample is damaged.
    From step ``pairs_from`` on documents are pairs of answers to one prompt, which come again every ``PAIR_STEPS``
    steps; 0: there are none. Each document leaves ``answer_room`` tokens of its pack free.
    """

    token_ids = TokenIds(media=MEDIA, end=END, pad=PAD)
    pack_tokens = 96

    def __init__(
        self,
        *,
        packs: int = 4,
        seed: int = 3,
        infinite_at: int = 0,
        corrupted_at: int = 0,
        begin_bytes: int = 0,
        long: bool = False,
        text: bool = False,
        packed: Mapping[int, tuple[int, int]] | None = None,
        empty: bool = False,
        seeing: int | None = None,
        hole_every: int = 0,
        pairs_from: int = 0,
        answer_room: int = 0,
    ):
        self._pairs_from, self._answer_room = pairs_from, answer_room
        self._empty, self._seeing, self._hole_every = empty, seeing, hole_every
        self._packed = sorted((packed or {}).items())
        self.packs_per_step, self._seed, self._infinite_at = packs, seed, infinite_at
        self._corrupted_at = corrupted_at
        self._begin_bytes, self.long, self._text = begin_bytes, long, text

    def packs_in(self, step: int) -> int:
        return self._packs_of(step)[0]

    def pack_tokens_in(self, step: int) -> int:
        return self._packs_of(step)[1]

    def _packs_of(self, step: int) -> tuple[int, int]:
        usual = self.packs_per_step, self.pack_tokens
        return next((packs for first, packs in reversed(self._packed) if first <= step), usual)

    @property
    def preference_sets(self) -> list[PreferenceSet | None]:
        return [PreferenceSet(digest=f"{self._seed:064x}", augmented=False) if self._pairs_from else None]

    def _are_pairs(self, step: int) -> bool:
        return 0 < self._pairs_from <= step

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        tokens: list[int] = []
        targets: list[int] = []
        positions: list[int] = []
        offsets, grids = [0], []
        images: list[Any] = []
        lost: list[int] = []
        padding: list[int] = []
        branches: list[list[int]] = []
        for pack in range(first, first + count):
            begun = len(tokens)
            for number, document in enumerate(self._in_pack(step, pack)):
                hole = self._is_hole(number)
                tokens += [PAD] * len(document[0]) if hole else document[0]
                targets += [-100] * len(document[0]) if hole else document[1]
                positions += _positions(document)
                padding += [len(offsets) - 1] * hole
                if self._are_pairs(step) and not hole:
                    sample = self._sample(step, pack, number)
                    branches += [[len(offsets) - 1, offsets[-1] + begin, 0, sample] for begin in document[4]]
                offsets.append(len(tokens))
                if document[3] is not None and hole:
                    lost.append(len(lost) + len(images))
                elif document[3] is not None:
                    images.append(document[2])
                    grids.append(document[3])
            gap = begun + self.pack_tokens_in(step) - len(tokens)
            tokens, targets, positions = tokens + [PAD] * gap, targets + [-100] * gap, positions + list(range(gap))
            padding.append(len(offsets) - 1)
            offsets.append(len(tokens))
        patches = np.concatenate([np.zeros((0, VALUES), np.float32), *images])
        if step == self._infinite_at and first == 0:
            patches[0, 0] = np.inf
        if step == self._corrupted_at:
            targets = [-100 if target == -100 else (target * 7 + 1) % 11 for target in targets]
        return PackedBatch(
            tokens_T=_placed(np.array(tokens), self._begin_bytes),
            targets_T=_placed(np.array(targets), self._begin_bytes),
            positions_T=_placed(np.array(positions), self._begin_bytes),
            document_offsets=np.array(offsets, np.int32),
            patches_PC=_placed(patches, self._begin_bytes),
            grids_I2=np.array(grids, np.int32).reshape(-1, 2),
            sample_ids=[str(number) for number in range(len(grids))],
            unmasked_tokens=sum(target != -100 for target in targets),
            lost_images=lost,
            padding_documents=padding,
            branches_B4=np.array(branches, np.int64).reshape(-1, 4),
        )

    def grids(self, step: int, *, first: int, count: int) -> list[Any]:
        return [
            np.array([page[3] for page in self._in_pack(step, pack) if page[3] is not None], np.int32).reshape(-1, 2)
            for pack in range(first, first + count)
        ]

    def pairs(self, step: int, *, first: int, count: int) -> Any:
        found = [
            [0, self._sample(step, pack, number)]
            for pack in range(first, first + count)
            for number in range(len(self._in_pack(step, pack)) if self._are_pairs(step) else 0)
        ]
        return np.array(found, np.int64).reshape(-1, 2)

    def _sample(self, step: int, pack: int, number: int) -> int:
        return (step % PAIR_STEPS * 100 + pack) * 100 + number

    def patches(self, step: int, *, pack: int, images: Sequence[int]) -> Any:
        there = [
            np.zeros_like(page[2]) if self._is_hole(number) else page[2]
            for number, page in enumerate(self._in_pack(step, pack))
            if page[3] is not None
        ]
        return np.concatenate([there[image] for image in images])

    def _is_hole(self, number: int) -> bool:
        return bool(self._hole_every) and number % self._hole_every == 1

    def _in_pack(self, step: int, pack: int) -> list[Any]:
        if pack >= self.packs_in(step):
            return []
        return self._long_documents(step, pack) if self.long else self._documents(step, pack)

    def _sees(self, pack: int) -> bool:
        return not self._text and (self._seeing is None or pack < self._seeing)

    def _documents(self, step: int, pack: int) -> list[Any]:
        pairs = self._are_pairs(step)
        draw = np.random.default_rng([self._seed, step % PAIR_STEPS if pairs else step, pack])
        documents: list[Any] = []
        left = 0 if self._empty else self.pack_tokens_in(step)
        while True:
            rows, columns, digits = 2 * int(draw.integers(1, 3)), 2 * int(draw.integers(1, 4)), int(draw.integers(1, 5))
            media = rows * columns // 4 if self._sees(pack) else 0
            answer = draw.integers(10, 20, size=digits).tolist()
            page = [2, *[MEDIA] * media, 4, *answer, END]
            masked = [-100] * (1 + media) + [*answer, END, -100]
            begins = []
            if pairs:
                other = draw.integers(10, 20, size=int(draw.integers(1, 5))).tolist()
                begins = [1 + media, len(page)]
                page, masked = [*page, 4, *other, END], [*masked, *other, END, -100]
            if len(page) > left:
                return documents
            left -= len(page) + self._answer_room
            image = draw.standard_normal((rows * columns, VALUES), np.float32)
            documents.append((page, masked, image, (rows, columns) if self._sees(pack) else None, begins))

    def _long_documents(self, step: int, pack: int) -> list[Any]:
        draw = np.random.default_rng([self._seed, step, pack, 1])
        first = int(draw.integers(40, 70))
        documents: list[Any] = []
        for number, length in enumerate((first, self.pack_tokens - first - 2)):
            grid = (4, 2 * int(draw.integers(1, 5))) if number == 0 and pack < 3 else None
            media = grid[0] * grid[1] // 4 if grid else 0
            answer = draw.integers(10, 20, size=length - media - 3).tolist()
            page, masked = [2, *[MEDIA] * media, 4, *answer, END], [-100] * (1 + media) + [*answer, END, -100]
            begins: list[int] = []
            if self._are_pairs(step):  # the second answer is the tail of the first
                begins = [1 + media, length // 2]
                page[begins[1]], masked[begins[1] - 1] = 4, -100
            image = draw.standard_normal((4 * media, VALUES), np.float32)
            documents.append((page, masked, image, grid, begins))
        return documents

    def state(self, step: int) -> dict[str, Any]:
        return {"seed": self._seed, "step": step}

    def refresh(self) -> None:
        """Nothing is appended."""

    def check_state(self, state: Mapping[str, Any]) -> None:
        if state["seed"] != self._seed:
            raise RefusedError(f"data order differs: seed {state['seed']}, this run has {self._seed}")


def _positions(document: Any) -> list[int]:
    begins, length = document[4], len(document[0])
    if not begins:
        return list(range(length))
    return [*range(begins[1]), *range(begins[0], begins[0] + length - begins[1])]


def _placed(array: Any, begin_bytes: int) -> Any:
    """The same numbers, beginning so many bytes after a multiple of 64: where a heap happens to have room."""
    room = np.empty(array.nbytes + 128, np.uint8)
    begin = -room.ctypes.data % 64 + begin_bytes
    placed = room[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    placed[...] = array
    return placed


class Questions:
    """Some held-out pages."""

    def __init__(self, count: int, *, pairs: bool = False) -> None:
        self._count, self._pairs = count, pairs

    def __len__(self) -> int:
        return self._count

    def sample(self, index: int) -> EvaluationSample:
        draw = np.random.default_rng([9, index])
        return EvaluationSample(
            sample_id=f"page-{index}",
            prompt_tokens=[2, MEDIA, MEDIA, 4],
            patches_PC=draw.standard_normal((8, VALUES), np.float32),
            grids_I2=np.array([[2, 4]], np.int32),
            question="what does the page say",
            expected=str(index),
            image_digest=f"{index:064x}",
        )

    set_names = ("odd", "even")
    tokens_max = 8

    @property
    def pack_sets(self) -> list[int]:
        return [number % 2 for number in range(self._count)]

    def pack(self, number: int) -> PackedBatch:
        """A pack of the step that is trained as ``HELD_OUT_STEP``; after the last pack nothing."""
        empty = number >= self._count
        pages = Pages(packs=max(1, self._count), text=empty, empty=empty, pairs_from=int(self._pairs))
        return pages.packs(HELD_OUT_STEP, first=0 if empty else number, count=1)

    thought_end = (7, 7)

    def text(self, tokens: Any) -> str:
        return " ".join(str(token) for token in tokens)
