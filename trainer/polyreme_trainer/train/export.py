"""The trained model in files that others read: experts gathered to rank 0, written by it alone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_trainer.export.huggingface import export_model
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState


@torch.no_grad()
def export(state: TrainState, settings: TrainSettings, meshes: Meshes, directory: Path, *, tokens: TokenIds) -> None:
    """Write the model; every rank calls it, since each holds experts that rank 0 lacks.

    Memory on rank 0: the whole model once, in host memory. Other ranks hold one gathered tensor at a time.

    Raises:
        OSError: On rank 0, if the disk refuses; an older export stays as it was.
    """
    stacked = {slot.name for slot in state.flat.experts.flat.slots}
    whole: dict[str, Tensor] = {}
    for name, tensor in state.model.state_dict().items():
        joined = collectives.gather_slices(tensor, meshes.ep_group) if name in stacked else tensor
        if meshes.rank == 0:
            whole[name] = joined.to("cpu")
    if meshes.rank == 0:
        export_model(whole, settings.shape, directory, tokens=tokens, tokenizer=settings.tokenizer)
