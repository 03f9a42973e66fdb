"""Export of the trained model: tensors gathered to rank 0 one by one, and written by rank 0 alone."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_trainer.export.huggingface import export_tensors
from polyreme_trainer.export.peft import export_adapters
from polyreme_trainer.model.adapters import is_adapter, merged
from polyreme_trainer.model.initialise import outline
from polyreme_trainer.model.sharding import cut_of, join
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import FlatModel
from polyreme_trainer.parallel.fsdp import gather_rows, is_sharded
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import DTYPES, TrainState


@torch.no_grad()
def export(state: TrainState, settings: TrainSettings, meshes: Meshes, directory: Path, *, tokens: TokenIds) -> None:
    """Write the model, its adapters merged, or these alone; every rank calls it, since each holds slices.

    Memory: one gathered tensor at a time, on every rank; on rank 0 all of the adapters.

    Raises:
        InvalidConfigError: On rank 0, if weights have no such form.
        OSError: On rank 0, if the disk refuses; an older export stays as it was.
    """
    held = {name: tensor for model in state.models.values() for name, tensor in model.state_dict().items()}
    types = {name: _type_of(tensor, DTYPES[settings.precision]) for name, tensor in held.items()}
    stages = collectives.gather_to_all(types, meshes.pp_group)
    expected = {
        name: torch.empty(tensor.shape, dtype=dtype, device="meta")
        for name, tensor in outline(settings.shape, settings.adapters).items()
        if is_adapter(name) == settings.adapters_alone
        for dtype in [next(stage[name] for stage in stages if name in stage)]
    }
    tensors = _to_first(state, held, expected, stages, meshes)
    try:
        if meshes.rank == 0 and settings.adapters is not None and settings.adapters_alone:
            export_adapters(dict(tensors), settings.adapters, directory, base=str(settings.weights or ""))
        elif meshes.rank == 0:
            export_tensors(
                expected,
                tensors,
                settings.shape,
                directory,
                tokens=tokens,
                tokenizer=settings.tokenizer,
                form=settings.export_form,
            )
    finally:
        # Joining takes every rank: the others, and rank 0 even if its disk has refused, go through the rest.
        for _ in tensors:
            pass


def _type_of(tensor: Tensor, computes_in: torch.dtype) -> torch.dtype:
    """Type of a tensor in the export: the type of the computation, also where its rows are held in another."""
    return computes_in if is_sharded(tensor) else tensor.dtype


def _to_first(
    state: TrainState,
    held: Mapping[str, Tensor],
    expected: Mapping[str, Tensor],
    stages: Sequence[Collection[str]],
    meshes: Meshes,
) -> Iterator[tuple[str, Tensor]]:
    """Join all tensors in the order of the model; on rank 0 yield each, whichever rank of the pipeline holds it.

    Args:
        state: This rank's.
        held: What this rank holds.
        expected: Shapes and types of all tensors.
        stages: Names of what each rank of the pipeline holds.
        meshes: This rank's place.
    """
    own, speaks = meshes.place("pp"), meshes.rank % (meshes.layout.world // meshes.layout.pp) == 0
    for name, like in expected.items():
        holder = own if name in held else next(place for place, names in enumerate(stages) if name in names)
        if holder == own:
            own_slice = merged(held, name, state.adapters)
            rows = gather_rows(own_slice).to(like.dtype) if is_sharded(own_slice) else own_slice
            joined = join_slices(name, rows, state.flat, meshes)
            if own and speaks:
                collectives.send(joined, 0, meshes.pp_group)
            elif meshes.rank == 0:
                yield name, joined
            del own_slice, rows, joined  # before the next one is made
        elif meshes.rank == 0:
            received = torch.empty(like.shape, dtype=like.dtype, device=state.flat.dense.values.device)
            collectives.receive(received, holder, meshes.pp_group)
            yield name, received
            del received


def join_slices(name: str, own: Tensor, flat: FlatModel, meshes: Meshes) -> Tensor:
    """Join the slices of a tensor that belongs to the parameter of this name, on every rank that holds some."""
    if name in flat.experts.slices.names:
        return collectives.gather_slices(own, meshes.ep_group)
    cut = cut_of(name)
    if name not in flat.tensor.slices.names or cut is None:
        return own
    return join(tuple(collectives.gather_slices(own.unsqueeze(0), meshes.tp_group)), cut)
