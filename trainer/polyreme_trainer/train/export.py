"""The trained model in files that others read: slices gathered to rank 0, written by it alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_api.plan.shapes import ModelShape
from polyreme_trainer.export.huggingface import export_model
from polyreme_trainer.model.initialise import outline
from polyreme_trainer.model.sharding import cut_of, join
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat import FlatModel
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState


@torch.no_grad()
def export(state: TrainState, settings: TrainSettings, meshes: Meshes, directory: Path, *, tokens: TokenIds) -> None:
    """Write the model; every rank calls it, since each holds slices that rank 0 lacks.

    Memory on rank 0: the whole model once, in host memory. Other ranks hold one gathered tensor at a time, and send
    those of their stages one by one.

    Raises:
        OSError: On rank 0, if the disk refuses; an older export stays as it was.
    """
    held = {name: tensor for model in state.models.values() for name, tensor in model.state_dict().items()}
    joined = ((name, join_slices(name, tensor, state.flat, meshes)) for name, tensor in held.items())
    whole: dict[str, Tensor] = {}
    dtypes = {name: tensor.dtype for name, tensor in held.items()}
    for name, tensor in _to_first(joined, dtypes, settings.shape, meshes):
        if meshes.rank == 0:
            whole[name] = tensor.to("cpu")
    if meshes.rank == 0:
        ordered = {name: whole[name] for name in outline(settings.shape)}
        export_model(ordered, settings.shape, directory, tokens=tokens, tokenizer=settings.tokenizer)


def _to_first(
    joined: Iterator[tuple[str, Tensor]], held: Mapping[str, torch.dtype], shape: ModelShape, meshes: Meshes
) -> Iterator[tuple[str, Tensor]]:
    """Yield this rank's tensors and, on rank 0, those that the later ranks of its pipeline send, one by one."""
    own, speaks = meshes.place("pp"), meshes.rank % (meshes.layout.world // meshes.layout.pp) == 0
    if meshes.layout.pp == 1 or not speaks:
        yield from joined  # to join slices takes every rank of the stage
        return
    dtypes = collectives.gather_to_all(held, meshes.pp_group)
    for name, tensor in joined:
        if own:
            collectives.send(tensor, 0, meshes.pp_group)
        else:
            yield name, tensor
    sizes = outline(shape) if own == 0 else {}
    for place in range(1, meshes.layout.pp) if own == 0 else ():
        for name, dtype in dtypes[place].items():
            received = torch.empty(sizes[name].shape, dtype=dtype)
            collectives.receive(received, place, meshes.pp_group)
            yield name, received


def join_slices(name: str, own: Tensor, flat: FlatModel, meshes: Meshes) -> Tensor:
    """Put together the slices of a tensor, which is of the parameter of this name, on every rank that holds some."""
    if name in flat.experts.slices.names:
        return collectives.gather_slices(own, meshes.ep_group)
    cut = cut_of(name)
    if name not in flat.tensor.slices.names or cut is None:
        return own
    return join(tuple(collectives.gather_slices(own.unsqueeze(0), meshes.tp_group)), cut)
