"""Our trainer on one device: the step that a rank's loop takes, on made-up packs that stay on the device."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import socket
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from benchmarks.gpu.harness import Place, release
from torch import Tensor, nn

from polyreme_datahub.objects import open_store
from polyreme_planner.flops import Mix
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.moe import Router
from polyreme_trainer.model.routing import Routing
from polyreme_trainer.parallel.world import RankSettings, World, open_world
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.settings import (
    CheckpointSettings,
    OptimizerName,
    OptimizerSettings,
    Precision,
    TrainSettings,
)
from polyreme_trainer.train.state import TrainState, backward, open_state, reduce, update

RATE = 1e-4


@dataclasses.dataclass(slots=True, kw_only=True)
class Trainer:
    """A model with its optimizer on one device."""

    state: TrainState
    world: World
    settings: TrainSettings
    last: Any = None
    """What ranks agreed on in the last step."""

    def step(self, inputs: Inputs) -> float:
        """Forward, backward, norm and clipping, AdamW, router biases: what the loop does; returns the loss."""
        total = reduce(self.state, backward(self.state, inputs), self.world.meshes)
        update(self.state, total, self.settings.optimizer, rate=RATE)
        self.last = total
        return total.loss

    @property
    def fullest(self) -> float:
        """Rows of the fullest expert of the last step, over the mean of its layer."""
        chosen = self.settings.shape.decoder.experts_per_token
        return Routing.from_numbers(self.last.routing_MX).summary(experts_per_token=chosen).load_max

    @property
    def model(self) -> nn.Module:
        """The whole model."""
        return self.state.models[0]


@contextlib.contextmanager
def trainer(
    shape: ModelShape,
    place: Place,
    *,
    options: ComputeOptions = DEFAULT_OPTIONS,
    optimizer: OptimizerSettings | None = None,
) -> Iterator[Trainer]:
    """Open a world of one rank, and the model in it."""
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        settings = TrainSettings(
            rank=RankSettings(
                rank=0,
                world=1,
                attempt=1,
                master_port=server.getsockname()[1],
                master_fd=server.detach(),
                device_type=place.device.type,
            ),
            layout=Layout(),
            shape=shape,
            steps=1_000_000,
            compute_options=options,
            checkpoint=CheckpointSettings(store=open_store(Path(folder).as_uri())),
            precision=Precision.FLOAT32 if place.rehearsal else Precision.BFLOAT16,
            optimizer=optimizer or OptimizerSettings(name=OptimizerName.ADAMW),
        )
        with open_world(settings.rank, settings.layout) as world:
            state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
            for model in state.models.values():
                model.train()
            # What building took must not count as what training takes.
            release()
            yield Trainer(state=state, world=world, settings=settings)
        del state
    release()


def made_up(shape: ModelShape, mix: Mix, place: Place, *, packs: int) -> Inputs:
    """Packs of a mix, on the device: data are not what is measured."""
    batch = synthetic_packs(shape, mix, packs=packs, seed=0)
    return to_inputs(batch, device=place.device, media_token=MEDIA_TOKEN)


def balance(model: nn.Module) -> None:
    """Route round robin from now on: every expert gets as many rows as any other (what others' figures often mean).

    Scores are made, chosen from and given gradients as before; only the choice is replaced.
    """
    for router in (module for module in model.modules() if isinstance(module, Router)):
        router.forward = functools.partial(_round_robin, router.forward)  # type: ignore[method-assign]


def _round_robin(
    natural: Callable[..., tuple[Tensor, Tensor, Tensor]], x_TD: Tensor, chosen_TK: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    weights_TK, experts_TK, scores_TE = natural(x_TD, chosen_TK)
    rows = torch.arange(experts_TK.numel(), device=experts_TK.device)
    return weights_TK, (rows % scores_TE.shape[1]).view_as(experts_TK), scores_TE
