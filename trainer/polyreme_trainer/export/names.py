"""Names in and out: ours are those of the Kimi-VL checkpoints, but for the experts, which we stack.

``...mlp.experts.gate_up_proj`` (E, 2F, D) and ``...mlp.experts.down_proj`` (E, D, F) become, for each expert K,
``...mlp.experts.K.gate_proj.weight``, ``up_proj.weight`` and ``down_proj.weight``. All else keeps its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor

from polyreme_api.errors import InvalidConfigError

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"
TEXT_PREFIX = "language_model."
_EXPERT = re.compile(r"^(?P<layer>.+)\.mlp\.experts\.(?P<expert>\d+)\.(?P<part>gate|up|down)_proj\.weight$")


def to_checkpoint(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Unstack the experts; tensors are views of ``state``."""
    unstacked: dict[str, Tensor] = {}
    for name, tensor in state.items():
        if name.endswith(GATE_UP):
            stem, half = name.removesuffix("gate_up_proj"), tensor.shape[1] // 2
            for expert, weight in enumerate(tensor):
                unstacked[f"{stem}{expert}.gate_proj.weight"] = weight[:half]
                unstacked[f"{stem}{expert}.up_proj.weight"] = weight[half:]
        elif name.endswith(DOWN):
            stem = name.removesuffix("down_proj")
            unstacked |= {f"{stem}{expert}.down_proj.weight": weight for expert, weight in enumerate(tensor)}
        else:
            unstacked[name] = tensor
    return unstacked


def from_checkpoint(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Stack the experts again: the inverse of ``to_checkpoint``.

    Raises:
        InvalidConfigError: If an expert of a layer or a part of one is missing.
    """
    state: dict[str, Tensor] = {}
    layers: dict[str, dict[tuple[int, str], Tensor]] = {}
    for name, tensor in tensors.items():
        if match := _EXPERT.match(name):
            layers.setdefault(match["layer"], {})[int(match["expert"]), match["part"]] = tensor
        else:
            state[name] = tensor
    for layer, parts in layers.items():
        experts = range(1 + max(expert for expert, _ in parts))
        missing = [
            (expert, part) for expert in experts for part in ("gate", "up", "down") if (expert, part) not in parts
        ]
        if missing:
            expert, part = missing[0]
            raise InvalidConfigError(
                f"export lacks an expert's weight: {layer}.mlp.experts.{expert}.{part}_proj.weight"
            )
        gate_up = [torch.cat((parts[expert, "gate"], parts[expert, "up"])) for expert in experts]
        state[layer + GATE_UP] = torch.stack(gate_up)
        state[layer + DOWN] = torch.stack([parts[expert, "down"] for expert in experts])
    return state


def text_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder alone, under the names of a causal language model (``model.layers...``, ``lm_head.weight``)."""
    return {name.removeprefix(TEXT_PREFIX): tensor for name, tensor in state.items() if name.startswith(TEXT_PREFIX)}
