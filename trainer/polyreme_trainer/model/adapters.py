"""Adapters beside frozen matrices (LoRA, arXiv:2106.09685): y = W x + (alpha / rank) B A x.

``adapt`` replaces the modules that hold the target matrices; the layers around them do not know. Only A and B learn.
Under tensor parallelism an adapter is cut as its matrix is (``sharding.py``): where ranks share the outputs they share
B's, where they share the inputs they share A's, and the other one is whole. So an adapter needs no exchange of its own:
its product is summed over ranks, or gathered, with that of its matrix.

Legend: S rows, I inputs, O outputs, L experts of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.shapes import DecoderShape
from polyreme_trainer.model.attention import LatentAttention
from polyreme_trainer.model.moe import Experts, FeedForward, MixtureOfExperts
from polyreme_trainer.model.vlm import KimiVL

A, B = "lora_A", "lora_B"
"""Ends of the names of adapters: those of PEFT."""
_PROJECTIONS = {Target.ATTENTION: LatentAttention, Target.DENSE: FeedForward}
"""Modules all of whose linear projections a target names."""


class AdaptedLinear(nn.Module):
    """A frozen matrix and its adapter."""

    bias = None

    def __init__(self, base: nn.Linear, adapters: Adapters) -> None:
        super().__init__()
        self.weight = base.weight
        outputs, inputs = base.weight.shape
        self.lora_A = nn.Parameter(torch.empty(adapters.rank, inputs))
        self.lora_B = nn.Parameter(torch.empty(outputs, adapters.rank))
        self.scale = adapters.scale

    def forward(self, x_SI: Tensor) -> Tensor:
        """Multiply by both."""
        inner_SR = F.linear(x_SI, self.lora_A) * self.scale
        return F.linear(x_SI, self.weight) + F.linear(inner_SR, self.lora_B)


class AdaptedExperts(Experts):
    """Experts whose grouped products have adapters, one for each expert."""

    def __init__(self, shape: DecoderShape, count: int, adapters: Adapters, *, clear_empty: bool) -> None:
        super().__init__(shape, count, clear_empty=clear_empty)
        self.scale = adapters.scale
        for name, matrix_LOI in list(self.named_parameters(recurse=False)):
            experts, outputs, inputs = matrix_LOI.shape
            self.register_parameter(f"{name}_{A}", nn.Parameter(torch.empty(experts, adapters.rank, inputs)))
            self.register_parameter(f"{name}_{B}", nn.Parameter(torch.empty(experts, outputs, adapters.rank)))

    def product(self, name: str, rows_SI: Tensor, counts_L: Tensor, ends_L: Tensor) -> Tensor:
        """Multiply by a stack of matrices, and by its adapters."""
        inner_SR = super().product(f"{name}_{A}", rows_SI, counts_L, ends_L) * self.scale
        added_SO = super().product(f"{name}_{B}", inner_SR, counts_L, ends_L)
        return super().product(name, rows_SI, counts_L, ends_L) + added_SO


def adapt(model: KimiVL, adapters: Adapters) -> None:
    """Add adapters to the target matrices of a model that is not on a device yet."""
    model.adapters = adapters
    projected = tuple(kind for target, kind in _PROJECTIONS.items() if target in adapters.targets)
    for module in list(model.language_model.modules()):
        if isinstance(module, projected):
            for name, child in list(module.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(module, name, AdaptedLinear(child, adapters))
        elif isinstance(module, MixtureOfExperts) and Target.EXPERTS in adapters.targets:
            clear = module.experts.clear_empty
            module.experts = AdaptedExperts(model.shape.decoder, len(model.experts_local), adapters, clear_empty=clear)


def is_adapter(name: str) -> bool:
    """Whether a parameter belongs to an adapter."""
    return name.endswith((A, B))


def is_trained(model: KimiVL, name: str) -> bool:
    """Whether a parameter may learn: with adapters only these."""
    return model.adapters is None or is_adapter(name)


def adapter_names(name: str) -> tuple[str, str]:
    """Return the names of A and B of the matrix of this name, in the model and in a checkpoint."""
    stem = f"{name.removesuffix('.weight')}." if name.endswith(".weight") else f"{name}_"
    return f"{stem}{A}", f"{stem}{B}"


@torch.no_grad()
def merged(held: Mapping[str, Tensor], name: str, adapters: Adapters | None) -> Tensor:
    """Return a matrix with its adapter added, in float32, if it has one; else as it is.

    Args:
        held: Tensors of a model, or a rank's slices of them.
        name: Of the matrix.
        adapters: Of the model.
    """
    weight = held[name]
    first, second = adapter_names(name)
    if adapters is None or first not in held:
        return weight
    added = held[second].float() @ held[first].float()
    return torch.add(weight.float(), added, alpha=adapters.scale).to(weight.dtype)
