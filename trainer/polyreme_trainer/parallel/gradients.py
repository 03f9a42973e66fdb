"""The reduction of a step: gradients, loss, counts, routing and requests of all ranks, in one all-reduce if possible.

The loss is a sum over unmasked tokens (or pairs), divided by their count over **all** ranks, so the gradient does not
depend on how a step's packs are split. Every rank back-propagates its own sum; the reduction adds, and one division at
the end makes the mean:

* whole dense parameters: summed over all ranks of the pipeline stage, which hold different tokens;
* tensor-parallel slices: summed over dp x cp, the ranks that hold the same slice;
* experts: one has already seen the tokens of its whole expert-parallel group, so only its copies (edp) are summed;
* all divided by the same global count.

Slices have an all-reduce of their own unless they are small (``flat_buffers.flatten``). The piggybacked scalars must
reach all ranks; with several stages, a second, small all-reduce over the world carries them.

With sharded parameters (``fsdp.py``), the backward pass has already summed their gradients.

Under ZeRO-1 (``zero1.py``), gradients are summed into the shares of their owners only, and the piggybacked scalars,
with the squared norms of all shares, take one small all-reduce over the world.

The clipping norm is the norm of the whole model's gradient, in float32: each scalar of the model counts once, however
many copies of it there are.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.model.transfer import on_device
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import FlatModel
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.zero1 import Zero1Update

_COUNT_BASE = 4096
"""Counts are sent as two digits of this base: float32 adds integers exactly only up to 2**24."""
_SQUARED_AT_ONCE = 1 << 24
"""Gradients that are squared at a time [scalars]; bounds the memory for the squares."""
_SCALARS = 8
_SLICED_SQUARE, _DENSE_SQUARE = 1, 6
"""Indices of the squared gradient norms among the scalars: of slices, and of whole parameters."""
_KNOWN = 2
"""Index of the first number that the host knows."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LocalStep:
    """Contribution of one rank to a step: loss and count of each token come from one rank, also if others hold it."""

    loss_sum: Tensor
    """Scalar: sum of the loss over what is counted on this rank; zero on ranks that repeat another's."""
    counted: int
    """Unmasked tokens, or what else the objective divides its loss by."""
    routing_MX: Tensor
    """X numbers about the routing of this rank's tokens, for all M layers of the model with experts; zero for layers of
    other stages."""
    stop: bool = False
    """This rank was asked to stop."""
    save: bool = False
    """This rank was asked for a checkpoint."""
    refresh: bool = False
    """A change of the mixture was fixed by this rank."""
    measured_M: Tensor | None = None
    """Sums of what the objective measures; None: zero."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GlobalStep:
    """The totals of all ranks; the same bits on every rank."""

    loss: float
    """Mean over all that is counted (float32)."""
    gradient_norm: float
    """Norm of the mean gradient, before clipping."""
    counted: int
    """Unmasked tokens, or what else the objective divides its loss by."""
    routing_MX: Tensor
    """On the device of the model."""
    reported_MX: Tensor
    """The same in host memory: it came with the other numbers."""
    stop: bool
    save: bool
    refresh: bool
    measured: tuple[float, ...] = ()
    """Means of what the objective measures."""

    @property
    def finite(self) -> bool:
        """Whether loss and gradient norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.gradient_norm)


def piggybacked_count(expert_layers: int, numbers: int, measured: int = 0) -> int:
    """Number of scalars at the end of the dense gradients, a part of them for each layer with experts."""
    return _SCALARS + expert_layers * numbers + measured


def reduce_step(flat: FlatModel, local: LocalStep, meshes: Meshes) -> GlobalStep:
    """Sum gradients in place (not yet divided by the count) and return what the ranks agree on."""
    piggybacked = flat.dense.piggybacked
    square = piggybacked.new_zeros(())
    for part, group in ((flat.tensor, meshes.replica_group), (flat.experts, meshes.edp_group)):
        if not part.fused:
            collectives.sum_over(part.flat.gradients, group)
            square = square + squared_norm(part.flat.gradients) / part.slices.copies
    for rows in flat.sharded:  # summed by the backward pass, and each scalar is on one rank of the stage
        square = square + squared_norm(rows.own_gradients)
    _write_piggybacked(piggybacked, local, square)
    collectives.sum_over(flat.dense.reduced, meshes.stage_group)
    piggybacked[_SLICED_SQUARE] += squared_norm(flat.dense.fused_gradients)
    piggybacked[_DENSE_SQUARE] = squared_norm(flat.dense.gradients)
    if meshes.layout.pp > 1:
        _sum_stages(piggybacked, meshes)
    return _read_piggybacked(piggybacked, local)


def reduce_zero1(flat: FlatModel, zero1: Zero1Update, local: LocalStep, meshes: Meshes) -> GlobalStep:
    """Sum gradients into the shares of their owners and return what the ranks agree on."""
    zero1.finish()
    # Shares do not overlap, so every scalar of the model is squared on one rank, also in a part without copies.
    squares = [squared_norm(part.own_gradients) for part in flat.parts if part.length]
    square = torch.stack(squares).sum() if squares else flat.dense.piggybacked.new_zeros(())
    _write_piggybacked(flat.dense.piggybacked, local, square)
    collectives.sum_over(flat.dense.piggybacked, meshes.world_group)
    return _read_piggybacked(flat.dense.piggybacked, local)


def _sum_stages(piggybacked: Tensor, meshes: Meshes) -> None:
    """Add the scalars of the stages, by one all-reduce over the world, so that all ranks get the same bits."""
    if dist.get_rank(meshes.stage_group):
        piggybacked.zero_()  # every rank of a stage holds the same: one of them contributes
    collectives.sum_over(piggybacked, meshes.world_group)


def gradient_scale(step: GlobalStep, *, norm_max: float) -> float:
    """Factor that turns summed gradients into the clipped mean; ``norm_max`` 0 clips nothing."""
    clip = min(1.0, norm_max / (step.gradient_norm + 1e-6)) if norm_max else 1.0
    return clip / step.counted


def _write_piggybacked(piggybacked: Tensor, local: LocalStep, sliced_square: Tensor) -> None:
    high, low = divmod(local.counted, _COUNT_BASE)
    piggybacked[0] = local.loss_sum.detach()
    piggybacked[_SLICED_SQUARE] = sliced_square
    # Numbers that the host knows come in one pinned copy: an assignment would wait for the accelerator, each of them.
    known = torch.tensor([high, low, local.stop, local.save, 0.0, local.refresh], dtype=piggybacked.dtype)
    (piggybacked[_KNOWN : _KNOWN + known.numel()],) = on_device([known], piggybacked.device)
    routing = local.routing_MX.numel()
    piggybacked[_SCALARS : _SCALARS + routing] = local.routing_MX.flatten()
    if local.measured_M is not None:
        measured = piggybacked[_SCALARS + routing :]
        measured[: local.measured_M.shape[0]] = local.measured_M


def _read_piggybacked(piggybacked: Tensor, local: LocalStep) -> GlobalStep:
    # One copy to the host for all of them; on an accelerator this and uneven exchanges are the step's only waits.
    host = piggybacked.to("cpu")
    loss_sum, sliced, high, low, stop, save, dense, refresh = host[:_SCALARS].tolist()
    square = dense + sliced
    counted = int(high) * _COUNT_BASE + int(low)
    routing = _SCALARS + local.routing_MX.numel()
    norm = math.sqrt(square) if math.isfinite(square) else math.nan
    return GlobalStep(
        loss=_float32(loss_sum / counted) if counted else math.nan,
        gradient_norm=norm / counted if counted else math.nan,
        counted=counted,
        routing_MX=piggybacked[_SCALARS:routing].view_as(local.routing_MX),
        reported_MX=host[_SCALARS:routing].view(local.routing_MX.shape),
        measured=tuple(total / counted for total in host[routing:].tolist()) if counted else (),
        stop=stop > 0,
        save=save > 0,
        refresh=refresh > 0,
    )


def squared_norm(gradients: Tensor) -> Tensor:
    """Square and add gradients.

    On a processor ``vector_norm`` and ``dot`` add sequentially: for 6.5 M float32 scalars they are up to 7e-4 off. An
    accelerator adds in a tree, and reads gradients once where squares would be written and read again.
    """
    if gradients.is_cuda:
        norm: Tensor = torch.linalg.vector_norm(gradients)
        return norm.square()
    squares = [piece.square().sum() for piece in gradients.split(_SQUARED_AT_ONCE)]
    return torch.stack(squares).sum()


def _float32(value: float) -> float:
    return float(np.float32(value))
