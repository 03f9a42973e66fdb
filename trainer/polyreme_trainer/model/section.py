"""Section of the model that a pipeline stage holds: a run of decoder layers, and the parts before and after them.

Names never depend on the split: a stage holds ``language_model.model.layers.7`` under that name, wherever it lies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import ModelShape


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Section:
    """A contiguous part of the model."""

    layers: range
    """Decoder layers, by their number in the whole model."""
    first: bool = True
    """Whether vision tower, projector and embedding belong to it."""
    last: bool = True
    """Whether final norm and output head belong to it."""


def whole(shape: ModelShape) -> Section:
    """Return the section that is the whole model."""
    return Section(layers=range(shape.decoder.layers))


def sections(shape: ModelShape, split: Sequence[tuple[int, int]]) -> tuple[Section, ...]:
    """Turn a split into the sections of its stages.

    Args:
        shape: Sizes of the model.
        split: First layer and layer after the last of each stage, in the order of the stages.

    Raises:
        InvalidConfigError: If the stages do not hold every layer once, or one between first and last holds none.
    """
    last = len(split) - 1
    edges = [0, *(end for _, end in split)]
    for stage, (start, end) in enumerate(split):
        if start != edges[stage] or end < start:
            raise InvalidConfigError(
                f"stage split does not fit: stage {stage} holds layers {start} to {end}, it must begin at layer "
                f"{edges[stage]}"
            )
        if start == end and 0 < stage < last:
            raise InvalidConfigError(
                f"stage split does not fit: stage {stage} holds no layer; only the first (tower, embedding) and the "
                "last (head) may"
            )
    if edges[-1] != shape.decoder.layers:
        raise InvalidConfigError(
            f"stage split does not fit: it ends at layer {edges[-1]}, the model has {shape.decoder.layers}"
        )
    return tuple(
        Section(layers=range(start, end), first=stage == 0, last=stage == last)
        for stage, (start, end) in enumerate(split)
    )
