"""One tensor of a folder of weights, by the header of its file."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """One tensor in a file."""

    file: str
    dtype: str
    """In safetensors' notation: ``BF16``."""
    shape: tuple[int, ...]
    size_bytes: int
    scales: str = ""
    """File of the scales of a quantised weight; empty for any other tensor."""
