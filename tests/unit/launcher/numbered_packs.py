"""A data engine over packs that are computed from their numbers, for tests that hurt it."""

from __future__ import annotations

import json
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api.batch import PackedBatch, PreferenceSet, TokenIds
from polyreme_api.errors import RefusedError
from polyreme_api.exit_codes import ExitCode
from polyreme_datahub.errors import SampleDamagedError
from polyreme_datahub.loader.engine.server import Engine, OpenedData, bytes_limit
from polyreme_datahub.loader.read.shard_files import ReadCounts
from polyreme_datahub.loader.sample.documents import LaidPacks
from polyreme_system.parent_death import end_with_parent

PACKS, TOKENS, STEPS = 8, 64, 50
DAMAGED_STEP, HANGING_STEP = 40, 41
PATCH_VALUES = 12


class NumberedPacks:
    """A ``BatchSource`` whose packs follow from their numbers; counts the reads of each."""

    def __init__(self, patches: int = 5, delay_s: float = 0.0) -> None:
        self.asked: dict[tuple[int, int, int], int] = {}
        self.reads = ReadCounts()
        self.closed, self.refreshed = False, 0
        self.jumped: list[Mapping[str, Any]] = []
        self._patches, self._delay_s = patches, delay_s
        self._lock = threading.Lock()

    def packs_in(self, step: int) -> int:
        return PACKS

    def pack_tokens_in(self, step: int) -> int:
        return TOKENS

    @property
    def token_ids(self) -> TokenIds:
        return TokenIds(media=1, end=2, pad=0)

    @property
    def preference_sets(self) -> list[PreferenceSet | None]:
        return [None, PreferenceSet(digest="abc", augmented=True)]

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        return self.laid(step, first=first, count=count).joined()

    def laid(self, step: int, *, first: int, count: int) -> LaidPacks:
        if first + count > PACKS:
            raise RefusedError(f"no packs {first}..{first + count}: step {step} has {PACKS}", field="spec.packs")
        if step == DAMAGED_STEP:
            raise SampleDamagedError(f"stored data is damaged: step {step}")
        if step == HANGING_STEP:
            time.sleep(3600)
        time.sleep(self._delay_s)
        with self._lock:
            self.asked[step, first, count] = self.asked.get((step, first, count), 0) + 1
        total = count * TOKENS
        seed = step * 1000 + first
        patches_PC = (np.arange(self._patches * PATCH_VALUES) + seed).astype(np.uint8).reshape(-1, PATCH_VALUES)
        batch = PackedBatch(
            tokens_T=np.arange(total) + seed,
            targets_T=np.arange(total) * 3 + seed,
            positions_T=np.arange(total) % 7,
            document_offsets=np.array([0, 10, total], np.int32),
            patches_PC=patches_PC[:0],
            grids_I2=np.array([[1, self._patches]], np.int32),
            sample_ids=[f"sample-{seed}", "placeholder:ü"],
            unmasked_tokens=seed,
            lost_images=[1],
            branches_B4=np.array([[0, 2, 1, seed], [0, 5, 1, seed]]),
        )
        return LaidPacks(batch, np.array_split(patches_PC, 3))

    def close(self) -> None:
        self.closed = True

    def grids(self, step: int, *, first: int, count: int) -> Sequence[npt.NDArray[np.int32]]:
        return [np.array([[pack, step]] * (pack % 3), np.int32).reshape(-1, 2) for pack in range(first, first + count)]

    def pairs(self, step: int, *, first: int, count: int) -> Any:
        return np.array([[pack, step] for pack in range(first, first + count)], np.int64)

    def patches(self, step: int, *, pack: int, images: Sequence[int]) -> npt.NDArray[np.uint8]:
        return np.full((len(images), PATCH_VALUES), pack + step, np.uint8)

    def state(self, step: int) -> Mapping[str, Any]:
        return {"data": "numbered", "step": step}

    def refresh(self) -> None:
        self.refreshed += 1

    def check_state(self, state: Mapping[str, Any]) -> None:
        if state.get("data") != "numbered":
            raise RefusedError(f"loader state belongs to other data: {state.get('data')!r}", field="spec.data")
        self.jumped.append(state)


def main(arguments: list[str]) -> int:
    """Serve as the engine's own module does; the job's file holds the delay of a read [s]."""
    end_with_parent(int(arguments[1]))
    engine = Engine(
        lambda path, *_: OpenedData(NumberedPacks(delay_s=json.loads(Path(path).read_text())), STEPS),
        bytes_max=bytes_limit({}),
    )
    engine.serve(socket.socket(fileno=int(arguments[0])))
    return int(ExitCode.OK)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
