"""Names of tensors in files: ours are those of the Kimi-VL checkpoints, except for the experts, which we stack.

``...mlp.experts.gate_up_proj`` (E, 2F, D) and ``...mlp.experts.down_proj`` (E, D, F) become, for each expert K,
``...mlp.experts.K.gate_proj.weight``, ``up_proj.weight`` and ``down_proj.weight``. All other names stay.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

GATE_UP = ".mlp.experts.gate_up_proj"
DOWN = ".mlp.experts.down_proj"
TEXT_PREFIX = "language_model."


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


def text_part(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The decoder alone, under the names of a causal language model (``model.layers...``, ``lm_head.weight``)."""
    return {name.removeprefix(TEXT_PREFIX): tensor for name, tensor in state.items() if name.startswith(TEXT_PREFIX)}
