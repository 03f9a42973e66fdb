"""The model of a committed checkpoint, or the mean of several, in one process, whatever layout saved them."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
from collections.abc import Iterator, Sequence

from torch import Tensor, nn

from polyreme_api.commit_marker import CommitMarker
from polyreme_api.errors import RefusedError
from polyreme_planner.checkpoint_model import check_base
from polyreme_planner.layout import Layout
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.parallel.pipeline import NO_STAGES
from polyreme_trainer.parallel.world import RankSettings, open_world
from polyreme_trainer.train.checkpoint_content import content, restored
from polyreme_trainer.train.fingerprint import frozen_fingerprint
from polyreme_trainer.train.initial_weights import begin
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, open_state

LOOPBACK = "127.0.0.1"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SavedModel:
    """A model that was read into this process, the only rank."""

    state: TrainState
    settings: TrainSettings
    """Of this rank, with the shape at the step of the checkpoint."""
    meshes: Meshes
    step: int
    """Of the last checkpoint."""


@contextlib.contextmanager
def open_saved(settings: TrainSettings, names: Sequence[str], *, media_token: int) -> Iterator[SavedModel]:
    """Read the model of a checkpoint, or the mean of those of several.

    Means are of parameters and router biases, taken in float32 (arXiv:1803.05407; Izmailov et al., "Averaging weights
    leads to wider optima").

    Args:
        settings: Shape and checkpoint root; rank and layout are not read: this process is the only rank.
        names: Of the checkpoints, the newest last.
        media_token: Token whose embedding an image feature replaces.

    Raises:
        NotFoundError: If there is no such checkpoint.
        InvalidConfigError: If adapters were trained beside weights that can't be read any more.
        RefusedError: If one is torn, damaged, of another format or model, if their stages have different positions, or
            if they hold adapters of other weights, or several adapters.
    """
    store = settings.checkpoint.store
    markers = {name: open_checkpoint(store, name, settings.shape, settings.adapters) for name in names}
    _check_mean(settings, markers)
    last = markers[names[-1]]
    shape = settings.shape_at(last.step)
    with socket.create_server((LOOPBACK, 0)) as server:
        port, descriptor = server.getsockname()[1], server.detach()
    alone = dataclasses.replace(
        settings,
        layout=Layout(),
        pipeline=NO_STAGES,
        rank=RankSettings(rank=0, world=1, attempt=1, master_port=port, master_fd=descriptor),
    )
    with open_world(alone.rank, alone.layout) as world:
        state = open_state(alone, world.meshes, media_token=media_token)
        if alone.adapters is not None:
            begin(state, alone, world.meshes, group=world.meshes.control_group)
            check_base(last, frozen_fingerprint(state, world.meshes), name=names[-1])
        held = content(state, world.meshes, with_rng=False, with_optimizer=False)
        sums: dict[str, Tensor] = {}
        for name, marker in markers.items():
            load_checkpoint(held, marker, store, name, group=world.meshes.control_group)
            restored(state)
            if len(names) > 1:
                _add(state.models[0], sums)
        for key, value in state.models[0].state_dict().items():
            if key in sums:
                value.copy_(sums[key] / len(names))
        yield SavedModel(
            state=state, settings=dataclasses.replace(alone, shape=shape), meshes=world.meshes, step=last.step
        )


def answering_model(settings: TrainSettings, name: str, *, media_token: int) -> tuple[KimiVL, int]:
    """Return the model of a checkpoint to ask, in host memory, and its step; arguments and errors as ``open_saved``."""
    with open_saved(settings, [name], media_token=media_token) as saved:
        model = saved.state.models[0]
        model.language_model.model.rope_theta = saved.settings.shape.decoder.rope_theta
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.grad = None
    return model.eval(), saved.step


def _check_mean(settings: TrainSettings, markers: dict[str, CommitMarker]) -> None:
    """Refuse the mean of checkpoints that have none."""
    *names, last = markers
    if settings.adapters is not None and names:
        raise RefusedError(
            "no mean of adapters: that of their two matrices is not that of their product; export one checkpoint",
            field="--last",
        )
    for name in names:
        if settings.shape_at(markers[name].step) != settings.shape_at(markers[last].step):
            raise RefusedError(
                f"no mean of checkpoints: {name} and {last} are of stages with different positions; take fewer",
                field="--last",
            )


def _add(model: nn.Module, sums: dict[str, Tensor]) -> None:
    """Add a model's numbers to sums."""
    for key, value in model.state_dict().items():
        if value.is_floating_point():
            sums[key] = value.float() + sums[key] if key in sums else value.float().clone()
