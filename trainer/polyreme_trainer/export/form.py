"""Form of exported weights: as trained, in another type, or in 4 bits by groups, as compressed-tensors packs them.

4 bits: the decoder's projections and feed-forwards, each rounded to the nearest of 16 levels of its group of inputs
(symmetric, no data needed). Tower, projector, router, norms, embeddings and head stay as they are. Format
``pack-quantized``: ``weight_packed`` holds eight inputs a word, the first in the lowest bits, each plus 8.

Legend: O outputs, I inputs, N groups of inputs, G inputs of a group, W words of eight inputs.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from polyreme_api.errors import InvalidConfigError

QUANTISED = re.compile(
    r"(language_model\.)?model\.layers\.\d+\.(self_attn\.\w+_proj|self_attn\.kv_a_proj_with_mqa"
    r"|mlp\.(shared_experts\.|experts\.\d+\.)?(gate|up|down)_proj)\.weight"
)
"""Names in files of the weights that are held in 4 bits."""
CUT_BY_INPUTS = re.compile(r".*\.(o_proj|down_proj)\.weight")
"""Those that tensor-parallel servers cut by their inputs, experts' too."""
IGNORED = ("re:.*vision_tower.*", "re:.*multi_modal_projector.*", "re:.*lm_head$", "re:.*mlp\\.gate$")
"""Modules that readers leave alone."""
ROUTER = re.compile(r".*\.mlp\.gate\.(weight|e_score_correction_bias)")
"""Names of what stays float32: rounding would send tokens to other experts."""
LEVELS = 16
WORD_BITS, BITS = 32, 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WeightsForm:
    """How weights are written."""

    dtype: torch.dtype | None = None
    """Type of all but routers; None: as trained."""
    int4_group: int | None = None
    """Inputs that share a scale, of weights in 4 bits; None: none are."""
    int4_ranks: int = 1
    """Tensor-parallel ranks of a server; each holds whole groups."""

    def of(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Return tensors as they are written, by their names in files; also of tensors on the meta device.

        Raises:
            InvalidConfigError: If a weight's inputs are no whole number of groups, or those of a rank are none.
        """
        made: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            dtype = tensor.dtype if self.dtype is None or ROUTER.fullmatch(name) else self.dtype
            if self.int4_group is not None and QUANTISED.fullmatch(name):
                ranks = self.int4_ranks if CUT_BY_INPUTS.fullmatch(name) else 1
                _check_groups(name, tensor.shape[1], self.int4_group, ranks)
                made |= _packed(name, tensor, self.int4_group, dtype)
            else:
                made[name] = tensor.to(dtype)
        return made

    @property
    def config(self) -> dict[str, Any]:
        """Return what ``config.json`` says of the form."""
        if self.int4_group is None:
            return {}
        weights = {
            "num_bits": BITS,
            "type": "int",
            "symmetric": True,
            "strategy": "group",
            "group_size": self.int4_group,
            "dynamic": False,
        }
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return {
            "quantization_config": {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": list(IGNORED),
                "kv_cache_scheme": None,
            }
        }


AS_TRAINED = WeightsForm()


def _check_groups(name: str, inputs: int, group: int, ranks: int) -> None:
    if inputs % (group * ranks) or inputs // ranks % (WORD_BITS // BITS):
        shared = f" for each of {ranks} ranks" if ranks > 1 else ""
        raise InvalidConfigError(
            f"4-bit groups do not fit: {name.removesuffix('.weight')} has {inputs} inputs, expected a multiple of "
            f"{group}{shared}; take a smaller group",
            field="--group",
        )


def _packed(name: str, weight_OI: Tensor, group: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Round a weight to 4 bits and pack it."""
    outputs, inputs = weight_OI.shape
    weight_ONG = weight_OI.float().view(outputs, -1, group)
    # Rounded first, so that each level is the product that a reader forms.
    scale_ON = (weight_ONG.abs().amax(-1) / ((LEVELS - 1) / 2)).to(dtype)
    least = torch.finfo(dtype).tiny
    level_ONG = (weight_ONG / scale_ON.float().clamp(min=least).unsqueeze(-1)).round()
    level_OI = (level_ONG.clamp(-LEVELS // 2, LEVELS // 2 - 1) + LEVELS // 2).to(torch.int64).view(outputs, inputs)
    level_OW8 = level_OI.view(outputs, -1, WORD_BITS // BITS)
    shift_8 = torch.arange(0, WORD_BITS, BITS, device=weight_OI.device)
    word_OW = (level_OW8 << shift_8).sum(-1)
    signed_OW = torch.where(word_OW >= 1 << (WORD_BITS - 1), word_OW - (1 << WORD_BITS), word_OW)
    return {
        f"{name}_packed": signed_OW.to(torch.int32),
        f"{name}_scale": scale_ON,
        f"{name}_shape": torch.tensor([outputs, inputs], dtype=torch.int64, device=weight_OI.device),
    }
