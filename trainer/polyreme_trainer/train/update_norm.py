"""Norm of the update that AdamW is about to make, over the whole model: it may jump before the loss does.

It is measured before the update, by the optimizer's own kernel on a copy of a few scalars at a time, so a step whose
update is out of line can still be dropped. Learning rate and weight decay are left out: the norm does not follow their
schedule. Muon's matrices are left out too, since the size of their directions is fixed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from polyreme_planner.curriculum import Learner
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import FlatModel
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.optimizer import Optimizer


def update_norm(
    flat: FlatModel,
    optimizer: Optimizer,
    meshes: Meshes,
    *,
    gradient_scale: float,
    learned: Mapping[Learner, int] | None = None,
) -> float:
    """Measure the next update; every rank calls it with summed gradients and gets the same bits. Changes nothing.

    Args:
        flat: The parameters of this rank.
        optimizer: Of this rank.
        meshes: Its place.
        gradient_scale: Factor that turns summed gradients into the clipped mean.
        learned: How often each part that learns has learned, including this step; None: all of them, at every step.
    """
    copies = _copies(flat, meshes)
    square = torch.zeros((), device=flat.dense.values.device)
    for part, direction in optimizer.directions(gradient_scale=gradient_scale, learned=learned):
        square += direction.square_().sum() / copies[id(part)]
    collectives.sum_over(square, meshes.world_group)
    total = square.item()
    return math.sqrt(total) if math.isfinite(total) else math.inf


def _copies(flat: FlatModel, meshes: Meshes) -> dict[int, int]:
    """Return how many ranks make the same update of each buffer: one if they shard it."""
    layout = meshes.layout
    whole = layout.dp * layout.cp * layout.tp
    held = [
        (flat.dense, whole),
        (flat.exact, whole),
        (flat.tensor.flat, flat.tensor.slices.copies),
        (flat.experts.flat, flat.experts.slices.copies),
    ]
    copies: dict[int, int] = {id(part): 1 for part in flat.sharded}
    return copies | {id(part): 1 if part.shares.count > 1 else count for part, count in held}
