"""Weights in 4 bits by groups of inputs, as compressed-tensors packs them (``pack-quantized``, symmetric).

Our own exports in 4 bits have this form (``export/form.py``).

Legend: R rows and C columns (inputs) of a part, W words of eight inputs, N groups of inputs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from polyreme_trainer.export.form import BITS, LEVELS, WORD_BITS
from polyreme_trainer.weights.stored import Stored

DTYPE = "I4"
"""Of a weight as a whole; its three parts have types of their own."""
WORDS, SCALES, SHAPE = "_packed", "_scale", "_shape"
"""Suffixes of the names of a weight's parts."""
INPUTS_PER_WORD = WORD_BITS // BITS


def joined(tensors: Mapping[str, Stored]) -> dict[str, Stored]:
    """Return tensors of a folder with the three parts of each packed weight as one, under the weight's name."""
    found = dict(tensors)
    for name, words in tensors.items():
        weight = name.removesuffix(WORDS)
        scales, shape = tensors.get(f"{weight}{SCALES}"), tensors.get(f"{weight}{SHAPE}")
        if weight == name or scales is None or shape is None or words.dtype != "I32" or len(words.shape) != 2:
            continue
        inputs = words.shape[1] * INPUTS_PER_WORD
        whole = len(scales.shape) == 2 and scales.shape[0] == words.shape[0]
        if whole and scales.shape[1] and not inputs % scales.shape[1]:
            for part in (WORDS, SCALES, SHAPE):
                del found[f"{weight}{part}"]
            found[weight] = Stored(words.file, DTYPE, (words.shape[0], inputs), words.size_bytes, scales=scales.file)
    return found


def columns_of_words(begin: int, end: int) -> slice:
    """Return the words that hold some inputs."""
    return slice(begin // INPUTS_PER_WORD, -(-end // INPUTS_PER_WORD))


def scaled(words_RW: Tensor, scale_RN: Tensor, *, first: int, columns: int, group: int) -> Tensor:
    """Return a part of a weight in float32.

    Args:
        words_RW: Words that hold its inputs.
        scale_RN: Scales of its rows, of all groups.
        first: Its first input.
        columns: Its inputs.
        group: Inputs that share a scale.
    """
    shift_8 = torch.arange(0, WORD_BITS, BITS, dtype=torch.int32)
    level_RC = ((words_RW.unsqueeze(-1) >> shift_8) & (LEVELS - 1)).flatten(1) - LEVELS // 2
    skipped = first % INPUTS_PER_WORD
    group_C = torch.arange(first, first + columns) // group
    return level_RC[:, skipped : skipped + columns].float() * scale_RN.float()[:, group_C]
