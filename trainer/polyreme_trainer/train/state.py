"""All state of training on one rank: model, optimizer, router biases, step; and one step of it.

Legend: M layers with experts, E experts.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from polyreme_trainer.checkpoint.content import Content, FlatTensors
from polyreme_trainer.model.initialise import STACKED, build_model
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.model.sharding import cut_of
from polyreme_trainer.model.tensor import ALONE
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.flat import FlatModel, Slices, flatten
from polyreme_trainer.parallel.gradients import GlobalStep, LocalStep, gradient_scale, reduce_step, rider_count
from polyreme_trainer.parallel.mesh import Meshes, experts_of, sparse_place
from polyreme_trainer.parallel.tensor import TensorGroup
from polyreme_trainer.train.inputs import Inputs, Sharing, sharing_of
from polyreme_trainer.train.optimizer import FlatAdamW, update_router_biases
from polyreme_trainer.train.settings import OptimizerSettings, TrainSettings


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainState:
    """What a checkpoint holds, as live objects."""

    model: KimiVL
    flat: FlatModel
    optimizer: FlatAdamW
    router_biases: list[Tensor]
    sharing: Sharing | None = None
    """The ranks that share this one's streams; no part of a checkpoint."""
    step: int = 0
    """Steps taken in the whole run."""


def open_state(settings: TrainSettings, meshes: Meshes, *, media_token: int) -> TrainState:
    """Build this rank's slice of the model with its initial values, in flat buffers, and an empty optimizer."""
    decoder, layout = settings.shape.decoder, settings.layout
    ranks = TensorGroup(meshes.tp_group) if layout.tp > 1 else ALONE
    model = build_model(
        settings.shape,
        seed=settings.seed,
        media_token=media_token,
        experts_local=experts_of(layout, meshes.rank, decoder.experts),
        dispatcher=AllToAllDispatcher(meshes.ep_group) if layout.ep > 1 else None,
        ranks=ranks,
        device=settings.rank.device_type,
    )
    parameters = dict(model.named_parameters())
    flat = flatten(
        parameters,
        riders=rider_count(decoder.layers - decoder.dense_layers, decoder.experts),
        tensor=Slices(
            names=frozenset(name for name in parameters if layout.tp > 1 and cut_of(name) is not None),
            place=ranks.place,
            count=layout.tp,
            copies=layout.dp * layout.cp,
        ),
        experts=Slices(
            names=frozenset(name for name in parameters if name.endswith(STACKED)),
            place=sparse_place(layout, meshes.rank)["ep"],
            count=layout.ep,
            copies=layout.edp,
        ),
    )
    return TrainState(
        model=model,
        flat=flat,
        optimizer=FlatAdamW(flat, settings.optimizer),
        router_biases=[m.gate.e_score_correction_bias for m in model.modules() if isinstance(m, MixtureOfExperts)],
        sharing=sharing_of(meshes, media_token=media_token, merge=settings.shape.vision.merge),
    )


def backward(state: TrainState, inputs: Inputs, *, stop: bool = False, save: bool = False) -> LocalStep:
    """Run forward and backward on this rank's tokens: gradients of the loss **sum** accumulate in the flat buffers."""
    state.flat.clear_gradients()
    decoded = state.model(
        inputs.tokens_T,
        inputs.positions_T,
        inputs.document_offsets,
        inputs.patches_PC,
        inputs.grids,
        attend=inputs.attend,
        deliver=inputs.deliver,
    )
    ranks = state.model.ranks
    loss_sum, _ = token_loss(decoded.hidden_TD, state.model.language_model.lm_head.weight, inputs.targets_T, ranks)
    loss_sum.backward()
    speaks = ranks.place == 0  # tensor ranks have the loss of the same tokens: one of them speaks
    return LocalStep(
        loss_sum=loss_sum.detach() if speaks else torch.zeros_like(loss_sum),
        unmasked=inputs.unmasked if speaks else 0,
        loads_ME=decoded.load_LE,
        stop=stop,
        save=save,
    )


def update(state: TrainState, total: GlobalStep, settings: OptimizerSettings, *, rate: float) -> None:
    """Take the optimizer's step and move the router's biases: the same on every rank."""
    scale = gradient_scale(total, norm_max=settings.gradient_norm_max)
    state.optimizer.step(learning_rate=rate, gradient_scale=scale)
    update_router_biases(state.router_biases, total.loads_ME, rate=settings.router_bias_rate)
    state.step += 1


def reduce(state: TrainState, local: LocalStep, meshes: Meshes) -> GlobalStep:
    """Agree with all ranks on gradients, loss, counts, loads and requests."""
    return reduce_step(state.flat, local, meshes)


def content(state: TrainState, meshes: Meshes, *, with_rng: bool = True) -> Content:
    """Name everything that a checkpoint must hold, as views of the live buffers (the generator's state is a copy)."""
    slices = {id(part.flat): (part.slices.place, part.slices.count) for part in (state.flat.tensor, state.flat.experts)}
    parts = [
        FlatTensors(prefix=prefix, slots=part.slots, buffer=buffer, part=slices.get(id(part)))
        for prefix, part, buffer in (
            *(("model", part, part.values) for part in state.flat.parts),
            *((f"optimizer.{kind}", part, buffer) for kind, part, buffer in state.optimizer.named()),
        )
    ]
    biases = {f"router_bias.{layer}": bias for layer, bias in enumerate(state.router_biases)}
    generator = {f"rng.{meshes.rank}": torch.get_rng_state()} if with_rng else {}
    return Content(flat=parts, plain={**biases, **generator})
