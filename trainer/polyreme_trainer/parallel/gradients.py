"""The reduction of a step: gradients, loss, counts, loads and requests of all ranks in one all-reduce, or two.

The second one is for experts that have copies, unless they are small (``flat.flatten``). The loss is a sum over
unmasked tokens, divided by their count over **all** ranks, so the gradient does not depend on how a step's packs are
split. Every rank back-propagates its own sum; the reduction adds, and one division at the end makes the mean:

* dense parameters: summed over all ranks, which hold different tokens;
* experts: one has already seen the tokens of its whole expert-parallel group, so only its copies (edp) are summed;
* both divided by the same global count.

The clipping norm is the norm of the whole model's gradient: an expert's part counts once, however many copies it has.
"""

from __future__ import annotations

import dataclasses
import math

import torch
from torch import Tensor

from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat import FlatModel
from polyreme_trainer.parallel.mesh import Meshes

_COUNT_BASE = 4096
"""Counts ride as two digits of this base: float32 adds whole numbers exactly up to 2**24 only."""
_SCALARS = 8
_EXPERT_SQUARE = 1
"""Place of the squared norm of the experts' gradients among the scalars."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """What one rank adds to a step."""

    loss_sum: Tensor
    """Scalar: sum of the loss over this rank's unmasked tokens."""
    unmasked: int
    loads_ME: Tensor
    """Tokens of this rank routed to each of E experts in each of M layers with experts."""
    stop: bool = False
    """This rank was asked to stop."""
    save: bool = False
    """This rank was asked for a checkpoint."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStep:
    """The same, of all ranks; the same bits on every rank."""

    loss: float
    """Mean over all unmasked tokens (float32)."""
    gradient_norm: float
    """Norm of the mean gradient, before clipping."""
    unmasked: int
    loads_ME: Tensor
    stop: bool
    save: bool

    @property
    def finite(self) -> bool:
        """Whether loss and gradient are numbers."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def rider_count(expert_layers: int, experts: int) -> int:
    """Numbers that ride at the end of the dense gradients."""
    return _SCALARS + expert_layers * experts


def reduce_step(flat: FlatModel, local: LocalStep, meshes: Meshes) -> GlobalStep:
    """Sum gradients in place (not yet divided by the count) and return what the ranks agree on."""
    riders, square = flat.dense.riders, torch.zeros(())
    if not flat.fused:
        collectives.sum_over(flat.experts.gradients, meshes.edp_group)
        square = _square(flat.experts.gradients) / meshes.layout.edp
    _write_riders(riders, local, square)
    collectives.sum_over(flat.dense.reduced, meshes.world_group)
    if flat.fused:
        riders[_EXPERT_SQUARE] = _square(flat.dense.guests)
    return _read_riders(riders, local, _square(flat.dense.gradients))


def gradient_scale(step: GlobalStep, *, norm_max: float) -> float:
    """Factor that turns summed gradients into the clipped mean; ``norm_max`` 0 clips nothing."""
    clip = min(1.0, norm_max / (step.gradient_norm + 1e-6)) if norm_max else 1.0
    return clip / step.unmasked


def _write_riders(riders: Tensor, local: LocalStep, expert_square: Tensor) -> None:
    high, low = divmod(local.unmasked, _COUNT_BASE)
    riders[0] = local.loss_sum.detach()
    riders[_EXPERT_SQUARE] = expert_square
    riders[2:6] = torch.tensor([high, low, local.stop, local.save], dtype=riders.dtype)
    riders[_SCALARS:] = local.loads_ME.flatten()


def _read_riders(riders: Tensor, local: LocalStep, dense_square: Tensor) -> GlobalStep:
    # One copy to the host for all of them; on an accelerator this is the step's only wait besides the dispatch.
    scalars = torch.cat([riders[:_SCALARS], dense_square.view(1)]).tolist()
    loss_sum, expert_square, high, low, stop, save, _, _, square = scalars
    unmasked = int(high) * _COUNT_BASE + int(low)
    norm = math.sqrt(square + expert_square) if math.isfinite(square + expert_square) else math.nan
    return GlobalStep(
        loss=_float32(loss_sum / unmasked) if unmasked else math.nan,
        gradient_norm=norm / unmasked if unmasked else math.nan,
        unmasked=unmasked,
        loads_ME=riders[_SCALARS:].view_as(local.loads_ME),
        stop=stop > 0,
        save=save > 0,
    )


def _square(gradients: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(gradients)
    return norm.square()


def _float32(value: float) -> float:
    return torch.tensor(value, dtype=torch.float32).item()
