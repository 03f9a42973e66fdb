"""What every contender of bench-loader does with a sample, and how it is measured: the same functions for all."""

import contextlib
import dataclasses
import json
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import usage

from polyreme_datahub.loader.augment import unchanged
from polyreme_datahub.loader.augment_pixels import change_pixels
from polyreme_datahub.operations.encode_text import encode_conversation, open_tokenizer, token_arrays
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.page_patches import colored, cut_patches
from polyreme_datahub.operations.values import Blob

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
    """

    tokenizer: Path
    patch_px: int
    merge: int

    def make(self, jpeg: bytes, facts: Mapping[str, Any]) -> dict[str, Any]:
        """Decode, resize, cut and encode one sample.

        Args:
            jpeg: The photograph.
            facts: Name, turns, and the grid that packing planned.
        """
        side, rows, columns = self.patch_px, *facts["grid"]
        image = Blob(jpeg, digest="").pixels(OpenRules(**facts["open"]))
        pixels = change_pixels(image, unchanged(columns * side, rows * side))
        patches_PC = colored(cut_patches(pixels, patch_px=side), patch_px=side)
        blob = Blob(self.tokenizer.read_bytes(), digest="the benchmark's") if not _OPEN else _OPEN[0]
        _OPEN[:] = [blob]
        encoded = encode_conversation(open_tokenizer(blob), facts["conversations"], [rows * columns // self.merge**2])
        tokens_T, learned_T = token_arrays(encoded)
        return {"name": facts["name"], "tokens": tokens_T, "learned": learned_T, "patches": patches_PC}


_OPEN: list[Blob] = []


def probe(tokens_T: npt.NDArray[Any], patches_PC: npt.NDArray[np.uint8]) -> int:
    """Return a checksum of a sample's tokens and of some of its patches."""
    return zlib.crc32(np.ascontiguousarray(patches_PC[::PROBE_ROWS]), zlib.crc32(tokens_T.astype(np.int64).tobytes()))


class Meter:
    """Measures a contender: from its first import to its last sample, all processes of it.

    The clock starts when it is made.
    """

    def __init__(self) -> None:
        self._imported_mib, self._most_mib = pss_mib(os.getpid()), 0.0
        self._own_s, self._started_s = usage.processor_s(os.getpid()), time.monotonic()
        self._first_s, self._batches = 0.0, 0
        self._probes: dict[str, int] = {}
        self._stopped: tuple[float, float] | None = None

    def take(self, name: str, tokens_T: npt.NDArray[Any], patches_PC: npt.NDArray[np.uint8]) -> None:
        """Take a sample."""
        assert name not in self._probes, name
        self._probes[name] = probe(tokens_T, patches_PC)

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

    def report(self, more: Mapping[str, float] | None = None) -> None:
        """Print one line of JSON."""
        self.stop()
        assert self._stopped is not None
        wall_s, cpu_s = self._stopped
        found = {
            "samples": len(self._probes),
            "samples_per_s": len(self._probes) / wall_s,
            "cpu_ms_per_sample": cpu_s / len(self._probes) * 1000,
            "first_batch_s": self._first_s,
            "pss_over_import_mib": self._most_mib - self._imported_mib,
            **(more or {}),
            "outputs": self._probes,
        }
        print(json.dumps(found))


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
