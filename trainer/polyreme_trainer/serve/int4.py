"""Weights in 4 bits for answers, by torch's own product: what trains is never rounded.

The weights of a group of inputs are rounded to the nearest of 16 levels; no data are needed. Held in 4 bits are the
products of the decoder's attention and feed-forwards but ``kv_b_proj``, whose two halves decoding uses as matrices.
Tower, projector, router, norms, embeddings and head stay as they are, and so does a matrix whose sizes torch's product
does not take.

Products are made in bfloat16 whatever the type of the model: in float32 torch has only a loop that is slower than the
product of the weights that were not rounded.

Legend: O outputs, I inputs, N groups of inputs, G inputs of a group, L experts of this rank, S rows.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_planner.int4_weights import GROUP, WeightsKind, check_device, packs
from polyreme_trainer.model.adapters import AdaptedLinear, merged
from polyreme_trainer.model.attention import LatentAttention
from polyreme_trainer.model.moe import Experts, FeedForward, MixtureOfExperts
from polyreme_trainer.model.vlm import KimiVL

LEVELS = 16
MIDDLE = LEVELS // 2
"""Level of torch's zero points."""
LEAST_SCALE = torch.finfo(torch.bfloat16).tiny
"""Divides weights that are all alike."""
_pack = torch.ops.aten._convert_weight_to_int4pack_for_cpu  # noqa: SLF001 - torch has no public name for it
_product = torch.ops.aten._weight_int4pack_mm_for_cpu  # noqa: SLF001
KEPT = ("kv_b_proj",)
_PRODUCTS = (LatentAttention, FeedForward)


class Int4Linear(nn.Module):
    """A matrix in 4 bits in place of an ``nn.Linear`` without bias."""

    bias = None
    words: Tensor
    scales: Tensor

    def __init__(self, weight_OI: Tensor, group: int = GROUP) -> None:
        """Round and pack.

        Raises:
            InvalidConfigError: If the matrix is on an accelerator.
        """
        check_device(weight_OI.device.type)
        super().__init__()
        self.group = group
        level_OI, scale_ON2 = rounded(weight_OI, group)
        words = _pack(level_OI.to(torch.int32), 1)
        self.register_buffer("words", words)
        self.register_buffer("scales", scale_ON2.transpose(0, 1).contiguous())

    def forward(self, x_SI: Tensor) -> Tensor:
        """Multiply rows."""
        out_SO: Tensor = _product(x_SI.to(torch.bfloat16).contiguous(), self.words, self.group, self.scales)
        return out_SO.to(x_SI.dtype)


class Int4Experts(nn.Module):
    """Experts in 4 bits in place of ``Experts``: torch has no grouped product of them, so each is one."""

    def __init__(self, gate_up_LOI: Tensor, down_LOI: Tensor, group: int = GROUP) -> None:
        super().__init__()
        self.gate_up_proj = nn.ModuleList(Int4Linear(weight_OI, group) for weight_OI in gate_up_LOI)
        self.down_proj = nn.ModuleList(Int4Linear(weight_OI, group) for weight_OI in down_LOI)

    def forward(self, rows_SD: Tensor, counts_L: Tensor) -> Tensor:
        """Apply expert e to its ``counts_L[e]`` rows; rows are sorted by expert."""
        each = zip(rows_SD.split(counts_L.tolist()), self.gate_up_proj, self.down_proj, strict=True)
        return torch.cat([_expert(own_SD, gate_up, down) if len(own_SD) else own_SD for own_SD, gate_up, down in each])


def _expert(rows_SD: Tensor, gate_up: nn.Module, down: nn.Module) -> Tensor:
    gate_SF, up_SF = gate_up(rows_SD).chunk(2, dim=-1)
    out_SD: Tensor = down(F.silu(gate_SF) * up_SF)
    return out_SD


def rounded(weight_OI: Tensor, group: int = GROUP) -> tuple[Tensor, Tensor]:
    """Return the levels of a matrix (O, I) from 0 to 15, and scales and zero points of its groups (O, N, 2; bfloat16).

    Of three ways to lay the levels of a group, that with the least error is taken: from its least weight to its
    largest, or around zero with the largest weight at one end or the other. One of the last two is exact for weights
    that were rounded so before, as those of an export in 4 bits.
    """
    weight_ONG = weight_OI.detach().float().unflatten(1, (-1, group))
    (least_ON, most_ON), largest_ON = weight_ONG.aminmax(dim=-1), weight_ONG.abs().amax(-1)
    none_ON = torch.zeros_like(largest_ON)
    spread_ON = (most_ON - least_ON) / (LEVELS - 1)
    ways = (
        (spread_ON, least_ON + MIDDLE * spread_ON),
        (largest_ON / MIDDLE, none_ON),
        (largest_ON / (LEVELS - 1 - MIDDLE), none_ON),
    )
    best_ON = torch.full_like(largest_ON, torch.inf)
    level_ONG, scale_ON2 = torch.zeros_like(weight_ONG), weight_ONG.new_zeros(*largest_ON.shape, 2)
    for scale_ON, zero_ON in ways:
        tried_ON2 = torch.stack((scale_ON, zero_ON), dim=-1).to(torch.bfloat16).float()
        scale_ON1, zero_ON1 = tried_ON2.clamp(min=LEAST_SCALE)[..., :1], tried_ON2[..., 1:]
        tried_ONG = ((weight_ONG - zero_ON1) / scale_ON1 + MIDDLE).round().clamp(0, LEVELS - 1)
        error_ON = ((tried_ONG - MIDDLE) * scale_ON1 + zero_ON1 - weight_ONG).square().sum(-1)
        better_ON1 = (error_ON < best_ON).unsqueeze(-1)
        best_ON = torch.minimum(error_ON, best_ON)
        scale_ON2 = torch.where(better_ON1, tried_ON2, scale_ON2)
        level_ONG = torch.where(better_ON1, tried_ONG, level_ONG)
    return level_ONG.flatten(1), scale_ON2.to(torch.bfloat16)


Replaced = tuple[nn.Module, str, nn.Module]
"""A module, and the child that it had under a name."""


@torch.no_grad()
def pack(model: KimiVL, layers: Iterable[nn.Module] | None = None, *, group: int = GROUP) -> list[Replaced]:
    """Put matrices in 4 bits in place of those of decoder layers; return what was replaced.

    Args:
        model: In host memory; adapters are merged first.
        layers: Of the model; None: all that it holds.
        group: Inputs that share a scale.

    Raises:
        InvalidConfigError: If they are on an accelerator.
    """
    replaced = []
    for layer in model.language_model.model.layers.values() if layers is None else layers:
        for owner, name, packed in list(_packed(model, layer, group)):
            replaced.append((owner, name, owner.get_submodule(name)))
            setattr(owner, name, packed)
    return replaced


@contextlib.contextmanager
def held_as(kind: WeightsKind, models: Iterable[KimiVL]) -> Iterator[None]:
    """Answer with weights of a kind: those in training stay as they are, and copies in 4 bits take their places."""
    replaced = [each for model in models for each in pack(model)] if kind is WeightsKind.INT4 else []
    try:
        yield
    finally:
        for owner, name, child in replaced:
            setattr(owner, name, child)


def weights_bytes(model: nn.Module) -> int:
    """Count the bytes of a model's weights, in whatever form they are held."""
    return sum(tensor.numel() * tensor.element_size() for tensor in [*model.parameters(), *model.buffers()])


def _packed(model: KimiVL, layer: nn.Module, group: int) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yield each product of a layer that can be held in 4 bits: its owner, its name there, what takes its place."""
    for module in layer.modules():
        if isinstance(module, _PRODUCTS):
            for name, child in module.named_children():
                if not isinstance(child, nn.Linear | AdaptedLinear) or name in KEPT:
                    continue
                if _fits(child.weight, group):
                    held = {f"{name}.{key}": value for key, value in child.state_dict().items()}
                    yield module, name, Int4Linear(merged(held, f"{name}.weight", model.adapters), group)
        elif isinstance(module, MixtureOfExperts) and isinstance(module.experts, Experts):
            held = module.experts.state_dict()
            gate_up_LOI, down_LOI = (merged(held, name, model.adapters) for name in ("gate_up_proj", "down_proj"))
            if _fits(gate_up_LOI, group) and _fits(down_LOI, group):
                yield module, "experts", Int4Experts(gate_up_LOI, down_LOI, group)


def _fits(weight: Tensor, group: int) -> bool:
    return packs(weight.shape[-2], weight.shape[-1], group)
