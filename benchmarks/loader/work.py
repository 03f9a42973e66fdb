"""The work of every contender of bench-loader on a sample, and how it is measured: the same functions for all.

Only the way from a JPEG to its pixels may be another: by Pillow, or by our package's function.
"""

import contextlib
import dataclasses
import io
import json
import os
import random
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from benchmarks.pipeline import usage
from PIL import Image, ImageEnhance

from polyreme_datahub.loader.sample.augment import AugmentSettings, Visit, draw_change
from polyreme_datahub.loader.sample.pixels import CHANNELS, change_pixels, colored, cut_patches, unchanged
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob
from polyreme_datahub.tokens import encode_conversation, open_tokenizer, token_arrays

PILLOW, OURS = "pillow", "ours"
RESIZERS = (PILLOW, OURS)
CROP_AREA_MIN, COLOR_SHARE = 0.6, 0.2
"""Smallest window, and most that a factor of brightness, contrast or saturation differs from 1."""
AUGMENTED = AugmentSettings(crop_area_min=CROP_AREA_MIN, color=(COLOR_SHARE, COLOR_SHARE, COLOR_SHARE))
PROBE_ROWS = 97
"""One patch of so many is looked at, to see that all contenders make the same."""
LOOK_BATCHES = 4
"""Memory is looked at once in so many batches."""
MIB = 2**20


@dataclasses.dataclass(slots=True)
class Work:
    """Makes tokens and patches of a JPEG and its conversation.

    Args:
        tokenizer: File of the tokenizer.
        patch_px: Side of a patch.
        merge: Patches per token, each way.
        resizer: ``OURS``: pixels are made by our package's function; ``PILLOW``: by Pillow, as a peer's user would.
    """

    tokenizer: Path
    patch_px: int
    merge: int
    resizer: str

    def make(self, jpeg: bytes, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Decode, resize, cut and encode one sample.

        Args:
            jpeg: The photograph.
            facts: Name, turns, and the grid that packing planned.
        """
        width, height = self._size(facts)
        if self.resizer == OURS:
            pixels = change_pixels(
                Blob(jpeg, digest="").pixels(OpenRules(**facts["open"][0])), unchanged(width, height)
            )
        else:
            pixels = pillow_pixels(jpeg, width, height)
        tokens_T, learned_T = self.encode(facts)
        return {"name": facts["name"], "tokens": tokens_T, "learned": learned_T, "patches": self._cut(pixels)}

    def encode(self, facts: Mapping[str, Any]) -> tuple[npt.NDArray[Any], npt.NDArray[Any]]:
        """Return the tokens of a sample, and a one for each that is learned."""
        blob = Blob(self.tokenizer.read_bytes(), digest="the benchmark's") if not _OPEN else _OPEN[0]
        _OPEN[:] = [blob]
        cells = [rows * columns // self.merge**2 for rows, columns in facts["grids"]]
        return token_arrays(encode_conversation(open_tokenizer(blob.digest, blob.data), facts["conversations"], cells))

    def augmented(self, jpeg: bytes, facts: Mapping[str, Any]) -> npt.NDArray[np.uint8]:
        """Return the patches of a random window in random colors; none where a sample has no image."""
        if not facts["grids"]:
            return np.zeros((0, CHANNELS * self.patch_px**2), np.uint8)
        size = self._size(facts)
        if self.resizer == PILLOW:
            return self._cut(pillow_augmented(jpeg, *size))
        visit = Visit(
            settings=AUGMENTED, seed=random.getrandbits(32), source="bench", sample_id=facts["name"], number=0
        )
        change = draw_change(visit, 0, size, None, geometry=True, mirror=True)
        return self._cut(change_pixels(Blob(jpeg, digest="").pixels(OpenRules(**facts["open"][0])), change))

    def _size(self, facts: Mapping[str, Any]) -> tuple[int, int]:
        [(rows, columns)] = facts["grids"]
        return columns * self.patch_px, rows * self.patch_px

    def _cut(self, pixels: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        return colored(cut_patches(pixels, patch_px=self.patch_px), patch_px=self.patch_px)


_OPEN: list[Blob] = []


def pillow_pixels(jpeg: bytes, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Decode and resize by Pillow."""
    with Image.open(io.BytesIO(jpeg)) as image:
        return np.asarray(image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC))


def pillow_augmented(jpeg: bytes, width: int, height: int) -> npt.NDArray[np.uint8]:
    """Decode by Pillow, resize a random window and change its colors: brightness, contrast, saturation."""
    with Image.open(io.BytesIO(jpeg)) as image:
        side = random.uniform(CROP_AREA_MIN, 1.0) ** 0.5
        left, top = (random.uniform(0.0, whole * (1.0 - side)) for whole in image.size)
        box = (left, top, left + side * image.width, top + side * image.height)
        made = image.convert("RGB").resize((width, height), Image.Resampling.BICUBIC, box=box)
    for change in (ImageEnhance.Brightness, ImageEnhance.Contrast, ImageEnhance.Color):
        made = change(made).enhance(random.uniform(1.0 - COLOR_SHARE, 1.0 + COLOR_SHARE))
    return np.asarray(made)


def probe(tokens_T: npt.NDArray[Any], patches_PC: npt.NDArray[np.uint8]) -> tuple[int, int]:
    """Return checksums of a sample's tokens and of some of its patches."""
    return zlib.crc32(tokens_T.astype(np.int64).tobytes()), zlib.crc32(patches_PC[::PROBE_ROWS].tobytes())


class Meter:
    """Measures a contender: from after its imports to its last sample, all processes of it.

    Its memory counts from when it is made; its clock too, or from ``start``.
    """

    def __init__(self) -> None:
        self._imported_mib, self._most_mib = pss_mib(os.getpid()), 0.0
        self.start()
        self._first_s, self._batches = 0.0, 0
        self._probes: dict[str, tuple[int, int]] = {}
        self._packs = self._tokens = self._patches = self._samples = 0
        self._stopped: tuple[float, float] | None = None

    def start(self) -> None:
        """Start the clocks: all processes of the contender have their imports."""
        self._own_s, self._started_s = usage.processor_s(os.getpid()), time.monotonic()

    def take(self, name: str, tokens_T: npt.NDArray[Any], patches_PC: npt.NDArray[np.uint8]) -> None:
        """Take a sample."""
        assert name not in self._probes, name
        self._probes[name] = probe(tokens_T, patches_PC)
        self._samples += 1

    def take_packs(self, packs: int, tokens: int, patches: int, samples: int) -> None:
        """Take a batch of packs: how much of each is in it, without padding."""
        self._packs, self._samples = self._packs + packs, self._samples + samples
        self._tokens, self._patches = self._tokens + tokens, self._patches + patches
        self.end_batch()

    def end_batch(self) -> None:
        """Note that a batch has come."""
        if not self._batches:
            self._first_s = time.monotonic() - self._started_s
        if self._batches % LOOK_BATCHES == 1:
            self._most_mib = max(self._most_mib, pss_mib(os.getpid()))
        self._batches += 1

    def stop(self) -> None:
        """Measure nothing after this."""
        if self._stopped is None:
            wall_s, cpu_s = time.monotonic() - self._started_s, usage.processor_s(os.getpid()) - self._own_s
            self._stopped = wall_s, cpu_s

    def report(self, more: Mapping[str, float] | None = None, *, pack_tokens: int = 0) -> None:
        """Print one line of JSON.

        Args:
            more: What else is to be reported.
            pack_tokens: Tokens of a pack, where packs were taken.
        """
        self.stop()
        assert self._stopped is not None
        wall_s, cpu_s = self._stopped
        found = {
            "samples": self._samples,
            "samples_per_s": self._samples / wall_s,
            "cpu_ms_per_sample": cpu_s / self._samples * 1000,
            "processors": cpu_s / wall_s,
            "first_batch_s": self._first_s,
            "pss_over_import_mib": self._most_mib - self._imported_mib,
            **(self._of_packs(wall_s, cpu_s, pack_tokens) if self._packs else {}),
            **(more or {}),
            "outputs": self._probes,
        }
        print(json.dumps(found))

    def _of_packs(self, wall_s: float, cpu_s: float, pack_tokens: int) -> dict[str, float]:
        return {
            "packs": self._packs,
            "patches_per_s": self._patches / wall_s,
            "cpu_ms_per_1000_patches": cpu_s / self._patches * 1_000_000,
            "fill": self._tokens / (self._packs * pack_tokens),
            "patches_per_token": self._patches / self._tokens,
        }


def pss_mib(root: int) -> float:
    """Return the proportional memory of a process and its descendants."""
    total_kib = 0
    for pid in processes(root):
        try:
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        except OSError:
            continue
        total_kib += sum(int(line.split()[1]) for line in lines if line.startswith("Pss:"))
    return total_kib * 1024 / MIB


def processes(root: int) -> list[int]:
    """Return a process and its descendants."""
    found = [root]
    for pid in found:
        for children in Path(f"/proc/{pid}/task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += map(int, children.read_text().split())
    return found
