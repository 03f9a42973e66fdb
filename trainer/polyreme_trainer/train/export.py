"""The trained model in files that others read: slices gathered to rank 0, written by it alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_trainer.export.huggingface import export_model
from polyreme_trainer.model.sharding import cut_of, join
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat import FlatModel
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState


@torch.no_grad()
def export(state: TrainState, settings: TrainSettings, meshes: Meshes, directory: Path, *, tokens: TokenIds) -> None:
    """Write the model; every rank calls it, since each holds slices that rank 0 lacks.

    Memory on rank 0: the whole model once, in host memory. Other ranks hold one gathered tensor at a time.

    Raises:
        OSError: On rank 0, if the disk refuses; an older export stays as it was.
    """
    whole: dict[str, Tensor] = {}
    for name, tensor in state.model.state_dict().items():
        joined = join_slices(name, tensor, state.flat, meshes)
        if meshes.rank == 0:
            whole[name] = joined.to("cpu")
    if meshes.rank == 0:
        export_model(whole, settings.shape, directory, tokens=tokens, tokenizer=settings.tokenizer)


def join_slices(name: str, own: Tensor, flat: FlatModel, meshes: Meshes) -> Tensor:
    """Put together the slices of a tensor, which is of the parameter of this name, on every rank that holds some."""
    if name in flat.experts.slices.names:
        return collectives.gather_slices(own, meshes.ep_group)
    cut = cut_of(name)
    if name not in flat.tensor.slices.names or cut is None:
        return own
    return join(tuple(collectives.gather_slices(own.unsqueeze(0), meshes.tp_group)), cut)
