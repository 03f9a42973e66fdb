"""Initial values that depend on the seed and the global name of a parameter alone, never on the layout.

Every tensor, and every expert of a stacked tensor, is drawn by a generator of its own. A rank that holds experts 4..7
draws just these and gets bit by bit what a rank with all experts has in their place; one that holds a slice of a tensor
draws the whole and cuts it.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor, nn

from polyreme_api.plan.shapes import ModelShape
from polyreme_trainer.model.moe import Dispatcher
from polyreme_trainer.model.section import Section
from polyreme_trainer.model.sharding import cut_of, slice_of, whole_shape
from polyreme_trainer.model.tensor import ALONE, TensorRanks
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.model.ways import PLAIN, Ways

STACKED = (".experts.gate_up_proj", ".experts.down_proj")
"""Ends of the names of parameters that stack experts."""


def build_model(
    shape: ModelShape,
    *,
    seed: int,
    media_token: int,
    section: Section | None = None,
    experts_local: range | None = None,
    dispatcher: Dispatcher | None = None,
    ranks: TensorRanks = ALONE,
    ways: Ways = PLAIN,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> KimiVL:
    """Build and initialise a model; parameters in ``dtype``, the router's correction bias in float32.

    Raises:
        InvalidConfigError: If ``experts_local`` or ``ranks`` do not fit the shape.
    """
    with torch.device("meta"):
        model = KimiVL(
            shape,
            media_token=media_token,
            section=section,
            experts_local=experts_local,
            dispatcher=dispatcher,
            ranks=ranks,
            ways=ways,
        )
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty))
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))
    initialise(model, seed=seed)
    return model


def outline(shape: ModelShape) -> dict[str, Tensor]:
    """Name every tensor of the whole model, in its order; tensors are on no device and take no memory."""
    with torch.device("meta"):
        return KimiVL(shape, media_token=0).state_dict()


@torch.no_grad()
def initialise(model: KimiVL, *, seed: int) -> None:
    """Fill every parameter: weights normal, norms one, biases and correction biases zero.

    Args:
        model: Any slice of the model.
        seed: The run's seed.
    """
    for name, parameter in model.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif "norm" in name.rsplit(".", 2)[-2]:
            parameter.fill_(1.0)
        elif name.endswith(STACKED):
            for place, expert in enumerate(model.experts_local):
                _draw(parameter[place], f"{name}.{expert}", seed, _spread(name, parameter[place], model.shape))
        elif model.ranks.parts > 1 and (cut := cut_of(name)) is not None:
            whole = torch.empty(whole_shape(parameter.shape, cut, model.ranks.parts))
            _draw(whole, name, seed, _spread(name, whole, model.shape))
            parameter.copy_(slice_of(whole, cut, place=model.ranks.place, parts=model.ranks.parts))
        else:
            _draw(parameter, name, seed, _spread(name, parameter, model.shape))
    for _, buffer in model.named_buffers():
        buffer.zero_()


def _spread(name: str, parameter: Tensor, shape: ModelShape) -> float:
    """Standard deviation: the decoder's own, and one over the root of the inputs for tower and projector."""
    if name.startswith("language_model."):
        return shape.decoder.initializer_range
    if name.endswith("pos_emb.weight"):
        return shape.decoder.initializer_range
    return 1.0 / math.sqrt(parameter[0].numel())


def _draw(parameter: Tensor, name: str, seed: int, spread: float) -> None:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float32) * spread)
