"""Initial weights of a run without a checkpoint: drawn by the seed, or those that its job names."""

from __future__ import annotations

import logging

import torch.distributed as dist

from polyreme_api.errors import PolyremeError
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.fsdp import rows_of
from polyreme_trainer.parallel.mesh import Meshes, experts_of
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.locations import Folder, folder_at
from polyreme_trainer.weights.slices import Place, Rows
from polyreme_trainer.weights.token_texts import check_tokens

_log = logging.getLogger(__name__)


def begin(state: TrainState, settings: TrainSettings, meshes: Meshes, *, group: dist.ProcessGroup) -> None:
    """Fill the model with the weights of ``settings.weights``, if there are any; every rank calls it.

    Raises:
        NotFoundError: If the folder or a file of it does not exist.
        InvalidConfigError: If the weights are damaged, not finite, or of another model or tokenizer.
        OSError: If a disk refuses. An error of one rank is raised by all.
    """
    if settings.weights is None:
        return
    folder = folder_at(settings.weights)
    met: PolyremeError | OSError | None = None
    try:
        if settings.tokenizer is not None and meshes.rank == 0:
            check_tokens(folder, settings.tokenizer.content)
        _fill(state, settings, meshes, folder)
    except (PolyremeError, OSError) as error:
        met = error
    errors = [error for error in collectives.gather_to_all(met, group) if error is not None]
    if errors:
        raise errors[0]


def _fill(state: TrainState, settings: TrainSettings, meshes: Meshes, folder: Folder) -> None:
    catalogue = read_catalogue(folder)
    names = check_fit(catalogue, settings.shape_at(1))
    slices = state.flat.tensor.slices
    place = Place(
        experts=experts_of(settings.layout, meshes.rank, settings.shape.decoder.experts),
        tensor=slices.place,
        tensor_parts=slices.count,
    )
    held = {
        name: Rows(own=own, first=first, rows=tensor.shape[0])
        for model in state.models.values()
        for name, tensor in model.state_dict().items()
        for own, first in [rows_of(tensor)]
    }
    filled = load_weights(held, catalogue, names, place)
    total = sum(rows.own.numel() for rows in held.values())
    _log.info(
        "rank %d begins with weights of %s, under %s's names: %d of its %d scalars, the rest is drawn",
        meshes.rank, folder, names.value, filled, total,
    )  # fmt: skip
