"""All training state of one rank: pipeline stages of the model, optimizer, router biases, step; and one step of it.

Legend: M layers with experts, E experts, L of the former on this rank, X numbers about the routing of one.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyreme_planner.adapters import Adapters
from polyreme_planner.curriculum import CurriculumStage, Learner
from polyreme_planner.schedules import V_SHAPED
from polyreme_trainer.model.adapters import is_trained
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.empty_groups import leaves_empty_groups_zero
from polyreme_trainer.model.initialise import EXACT, STACKED, build_model, drawn_rows, open_buffers
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.model.routing import Routing, numbers_of_a_layer
from polyreme_trainer.model.sharding import cut_of
from polyreme_trainer.model.stage import Stage
from polyreme_trainer.model.tensor import ALONE, TensorRanks
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.flat_buffers import FlatModel, Slices, Storage, Update, flatten
from polyreme_trainer.parallel.flat_layout import Shares
from polyreme_trainer.parallel.fsdp import ShardedParameters, row_groups, rows_of, shard
from polyreme_trainer.parallel.gradients import (
    GlobalStep,
    LocalStep,
    gradient_scale,
    piggybacked_count,
    reduce_step,
    reduce_zero1,
)
from polyreme_trainer.parallel.mesh import Meshes, experts_of, sparse_place
from polyreme_trainer.parallel.pipeline import Pipeline, held_sections, open_pipeline, stage_ranks
from polyreme_trainer.parallel.tensor import TensorGroup
from polyreme_trainer.parallel.zero1 import Zero1Update, open_zero1, update_groups
from polyreme_trainer.train.host_state import Visits, visits_of
from polyreme_trainer.train.image_assignment import ImageBalancer, image_balancer_of, image_group
from polyreme_trainer.train.inputs import Inputs, Sharing, sharing_of
from polyreme_trainer.train.loss_health import LossHistory
from polyreme_trainer.train.muon import whole_names
from polyreme_trainer.train.objectives.kinds import objective_of
from polyreme_trainer.train.objectives.objective import Weigher
from polyreme_trainer.train.optimizer import Optimizer, learner_of, longest_visit, update_router_biases
from polyreme_trainer.train.reference_weights import ReferenceWeights
from polyreme_trainer.train.settings import (
    ImagesOver,
    OptimizerName,
    OptimizerSettings,
    ParameterSharding,
    Precision,
    TrainSettings,
)

_log = logging.getLogger(__name__)

DTYPES = {Precision.FLOAT32: torch.float32, Precision.BFLOAT16: torch.bfloat16}


@dataclasses.dataclass(slots=True, kw_only=True)
class TrainState:
    """The content of a checkpoint, as live objects."""

    stages: dict[int, Stage]
    """Pipeline stages of this rank by their number, rising; without a pipeline one, the whole model."""
    pipeline: Pipeline
    stage_ranks: tuple[int, ...]
    """The rank of the pipeline that holds each stage."""
    flat: FlatModel
    optimizer: Optimizer
    zero1: Zero1Update | None
    """Exchanges of a sharded update (ZeRO-1); None if each rank makes all of it."""
    router_biases: dict[int, Tensor]
    """By the index of their layer among the model's layers with experts."""
    sharing: Sharing | None = None
    """The ranks that share this one's streams; not part of a checkpoint."""
    image_balancer: ImageBalancer | None = None
    """The neighbours that take each other's images; None if each encodes its own, or this rank has no tower."""
    step: int = 0
    """Steps taken in the whole run."""
    losses: LossHistory = dataclasses.field(default_factory=LossHistory)
    curriculum_stage: CurriculumStage | None = None
    """Curriculum stage that was entered; not part of a checkpoint, since it follows from the step."""
    weigher: Weigher | None = None
    """Weighs tokens by that stage's objective; None: each counts one."""
    reference: ReferenceWeights | None = None
    """Weights of the stage's reference, where its pairs are scored in every step."""

    @property
    def models(self) -> dict[int, KimiVL]:
        """The section of the model of each stage."""
        return {number: stage.model for number, stage in self.stages.items()}

    @property
    def adapters(self) -> Adapters | None:
        """Adapters, if only they learn."""
        return next(iter(self.stages.values())).model.adapters

    @property
    def computes_in(self) -> torch.dtype:
        """Type of the computation."""
        return next(iter(self.models.values())).like.dtype

    @property
    def media_token(self) -> int:
        """Token whose embedding an image feature replaces."""
        return next(iter(self.stages.values())).model.media_token


def open_state(settings: TrainSettings, meshes: Meshes, *, media_token: int) -> TrainState:
    """Build this rank's slice of the model with its initial values, in flat buffers, and an empty optimizer.

    Raises:
        InvalidConfigError: If experts, layers or widths do not fit the layout.
    """
    layout, ranks = settings.layout, _tensor_ranks(settings, meshes)
    groups = _open_groups(settings, meshes)  # before the model takes the memory
    stages = _build(settings, meshes, ranks, media_token)
    rows = settings.parameter_sharding is ParameterSharding.FSDP2
    sharded = _shard(settings, stages, meshes, groups) if rows else ()
    _hold_frozen(settings, stages)
    flat = _flatten(settings, meshes, ranks, stages, sharded)
    _draw(settings, stages, flat)
    return TrainState(
        stages=stages,
        pipeline=open_pipeline(stages, settings.pipeline, meshes, device=settings.rank.device_type),
        stage_ranks=stage_ranks(settings.pipeline, layout.pp),
        flat=flat,
        optimizer=Optimizer(
            flat,
            settings.optimizer,
            tensor_group=meshes.tp_group if layout.tp > 1 else None,
            visits=_visits(settings, flat),
        ),
        zero1=_zero1(settings, flat, stages, groups),
        router_biases={
            layer: bias_E for stage in stages.values() for layer, bias_E in router_biases(stage.model).items()
        },
        sharing=sharing_of(meshes, media_token=media_token, shape=settings.shape),
        image_balancer=image_balancer_of(meshes, settings.shape, groups) if _balances(settings, meshes) else None,
    )


def _visits(settings: TrainSettings, flat: FlatModel) -> Visits | None:
    """Return visits of state in host memory; None where there is none, or the model is there too."""
    device = torch.device(settings.rank.device_type)
    if device.type == "cpu" or not settings.optimizer.state_on_host:
        return None
    return visits_of(device, longest_visit(flat.parts, settings.optimizer))


def _tensor_ranks(settings: TrainSettings, meshes: Meshes) -> TensorRanks:
    return TensorGroup(meshes.tp_group) if settings.layout.tp > 1 else ALONE


def _build(settings: TrainSettings, meshes: Meshes, ranks: TensorRanks, media_token: int) -> dict[int, Stage]:
    """Build this rank's stages without memory for their parameters."""
    layout, options = settings.layout, _options(settings)
    stages = {
        number: Stage(
            build_model(
                settings.shape,
                seed=settings.seed,
                media_token=media_token,
                section=section,
                experts_local=experts_of(layout, meshes.rank, settings.shape.decoder.experts),
                dispatcher=AllToAllDispatcher(meshes.ep_group) if layout.ep > 1 else None,
                ranks=ranks,
                options=options,
                adapters=settings.adapters,
                device="meta",
            )
        )
        for number, section in held_sections(settings.pipeline, meshes, settings.shape).items()
    }
    for stage in stages.values():
        open_buffers(stage.model, settings.rank.device_type)
    return stages


def _options(settings: TrainSettings) -> ComputeOptions:
    """Add what the device needs."""
    device, dtype = settings.rank.device_type, DTYPES[settings.precision]
    if device == "cpu" or leaves_empty_groups_zero(device, dtype):
        return settings.compute_options
    _log.warning("gradients of experts without rows are not zero on this device: they are cleared at every step")
    return dataclasses.replace(settings.compute_options, clear_empty=True)


def _hold_frozen(settings: TrainSettings, stages: Mapping[int, Stage]) -> None:
    """Give parameters that never learn memory of their own."""
    for stage in stages.values():
        names = [name for name, _ in stage.model.named_parameters() if not is_trained(stage.model, name)]
        hold_frozen(settings, stage.model, names)


def hold_frozen(settings: TrainSettings, model: KimiVL, names: Sequence[str]) -> None:
    """Give parameters memory of their own: they have no gradient and no state."""
    for name in names:
        dtype = torch.float32 if name.endswith(EXACT) else DTYPES[settings.precision]
        empty = torch.empty(model.get_parameter(name).shape, dtype=dtype, device=settings.rank.device_type)
        module, _, own = name.rpartition(".")
        model.get_submodule(module).register_parameter(own, nn.Parameter(empty, requires_grad=False))


def _flatten(
    settings: TrainSettings,
    meshes: Meshes,
    ranks: TensorRanks,
    stages: Mapping[int, Stage],
    sharded: Sequence[ShardedParameters],
) -> FlatModel:
    """Move all parameters that are not sharded into flat buffers."""
    layout, decoder = settings.layout, settings.shape.decoder
    parameters = {name: parameter for stage in stages.values() for name, parameter in stage.model.named_parameters()}
    elsewhere = {slot.name for part in sharded for slot in part.slots}
    elsewhere |= {name for stage in stages.values() for name in parameters if not is_trained(stage.model, name)}
    stage_ranks = layout.world // layout.pp
    flat = flatten(
        {name: parameter for name, parameter in parameters.items() if name not in elsewhere},
        piggybacked=piggybacked_count(
            decoder.layers - decoder.dense_layers, numbers_of_a_layer(decoder.experts), _measures(settings)
        ),
        stage=Shares(count=stage_ranks, place=meshes.rank % stage_ranks),
        tensor=Slices(
            names=frozenset(name for name in parameters if layout.tp > 1 and cut_of(name) is not None),
            place=ranks.place,
            count=layout.tp,
            copies=layout.dp * layout.cp,
            copy=meshes.rank % stage_ranks // layout.tp,
        ),
        experts=Slices(
            names=frozenset(name for name in parameters if name.endswith(STACKED)),
            place=sparse_place(layout, meshes.rank)["ep"],
            count=layout.ep,
            copies=layout.edp,
            copy=sparse_place(layout, meshes.rank)["edp"],
        ),
        update=_update(settings, parameters),
    )
    owners = {name: stage.model for stage in stages.values() for name, _ in stage.model.named_parameters()}
    for part in flat.parts:
        for slot, parameter in part.parameters():
            module, _, name = slot.name.rpartition(".")
            owners[slot.name].get_submodule(module).register_parameter(name, parameter)
    return dataclasses.replace(flat, sharded=tuple(sharded))


def _measures(settings: TrainSettings) -> int:
    """Numbers that the objectives of the run measure in a step."""
    objectives = (objective_of(stage.objective) for stage in settings.curriculum_stages)
    return max(len(objective.metrics) if objective else 0 for objective in objectives)


@torch.no_grad()
def _draw(settings: TrainSettings, stages: Mapping[int, Stage], flat: FlatModel) -> None:
    """Set the initial values, a tensor at a time, in the buffers where they stay."""
    places = {slot.name: (part, slot) for part in flat.parts for slot in part.slots}
    for stage in stages.values():
        for name, first, rows in drawn_rows(stage.model, seed=settings.seed, rows_of=rows_of):
            if name in places:
                part, slot = places[name]
                part.put(slot, first, rows)
            else:
                stage.model.get_parameter(name)[first : first + rows.shape[0]].copy_(rows)


def _open_groups(settings: TrainSettings, meshes: Meshes) -> dict[str, dist.ProcessGroup]:
    """Open the groups that only some settings need; last those of images, which only ranks of the first stage have."""
    groups: dict[str, dist.ProcessGroup] = {}
    if _uses_zero1(settings):
        groups |= meshes.communicators.open(update_groups(meshes))
    if settings.parameter_sharding is ParameterSharding.FSDP2:
        groups |= meshes.communicators.open(row_groups(meshes))
    if _balances(settings, meshes):
        groups |= meshes.communicators.open(image_group(meshes))
    return groups


def _balances(settings: TrainSettings, meshes: Meshes) -> bool:
    """Whether data-parallel ranks share images; only ranks with the first stage encode some."""
    encodes = stage_ranks(settings.pipeline, settings.layout.pp)[0] == meshes.place("pp")
    return encodes and settings.shape.sees and settings.images_over is ImagesOver.DATA


def _update(settings: TrainSettings, parameters: Mapping[str, Tensor]) -> Update:
    whole: frozenset[str] = frozenset()
    if settings.optimizer.name is OptimizerName.MUON:
        whole = whole_names((name, tuple(parameter.shape)) for name, parameter in parameters.items())
    return Update(
        storage=Storage(
            dtype=DTYPES[settings.precision],
            device=settings.rank.device_type,
            state_on_host=settings.optimizer.state_on_host,
        ),
        exact=frozenset(name for name in parameters if name.endswith(EXACT)),
        whole=whole,
        zero1=_uses_zero1(settings),
        bucket_scalars=settings.optimizer.bucket_scalars,
    )


def _uses_zero1(settings: TrainSettings) -> bool:
    """Whether the update is sharded by ZeRO-1; with sharded parameters little is left, and every rank updates that."""
    return settings.optimizer.zero1 and settings.parameter_sharding is ParameterSharding.NONE


def _shard(
    settings: TrainSettings, stages: dict[int, Stage], meshes: Meshes, groups: Mapping[str, dist.ProcessGroup]
) -> tuple[ShardedParameters, ...]:
    return shard(
        stages,
        meshes,
        dtype=DTYPES[settings.precision],
        device=settings.rank.device_type,
        groups=groups,
    )


def _zero1(
    settings: TrainSettings, flat: FlatModel, stages: Mapping[int, Stage], groups: Mapping[str, dist.ProcessGroup]
) -> Zero1Update | None:
    if not _uses_zero1(settings):
        return None
    apart = settings.pipeline.schedule in V_SHAPED  # gradients of weights, from those of the layers' inputs
    return open_zero1(flat, groups, [stage.model for stage in stages.values()], by_layer=not apart)


def router_biases(model: KimiVL) -> dict[int, Tensor]:
    """Return the routers' biases that a model holds, by the number of their layer among those with experts."""
    return {
        int(index) - model.shape.decoder.dense_layers: layer.mlp.gate.e_score_correction_bias
        for index, layer in model.language_model.model.layers.items()
        if isinstance(layer.mlp, MixtureOfExperts)
    }


def backward(
    state: TrainState,
    *microbatches: Inputs,
    stop: bool = False,
    save: bool = False,
    refresh: bool = False,
    whole: bool = False,
) -> LocalStep:
    """Run forward and backward on this rank's tokens: gradients of the loss **sum** accumulate in the flat buffers.

    With ``whole``, none is summed over ranks before ``reduce``.

    Raises:
        InvalidConfigError: If microbatches do not fit the model or each other.
    """
    # No ``settle``: modules wait for their own parameters when they run.
    state.flat.clear_gradients()
    if state.zero1 is not None:
        state.zero1.begin(len(microbatches) + whole)  # a pass that never comes
    loss_sum = state.pipeline.run(microbatches)
    last = max(state.models.items())[1]
    # Tensor ranks, and the ranks of a pipeline, have the same tokens: the one that computes the loss reports it.
    speaks = last.section.last and last.ranks.place == 0
    return LocalStep(
        loss_sum=loss_sum if speaks else torch.zeros_like(loss_sum),
        counted=sum(_counted(state.weigher, microbatch) for microbatch in microbatches) if speaks else 0,
        routing_MX=_routing(state),
        measured_M=_measured(state.weigher, speaks=speaks),
        stop=stop,
        save=save,
        refresh=refresh,
    )


def _counted(weigher: Weigher | None, microbatch: Inputs) -> int:
    if weigher is None:
        return microbatch.unmasked
    branches = microbatch.branches
    return weigher.objective.counted(branches) if branches is not None else 0


def _measured(weigher: Weigher | None, *, speaks: bool) -> Tensor | None:
    measured_M = None if weigher is None else weigher.take()
    return measured_M if speaks else None


def _routing(state: TrainState) -> Tensor:
    """Put the routing of this rank's layers in their places among all layers with experts."""
    numbers = [stage.take_routing().numbers() for stage in state.stages.values()]
    decoder = max(state.models.items())[1].shape.decoder
    layers = decoder.layers - decoder.dense_layers
    held_LX = torch.cat(numbers)
    if held_LX.shape[0] == layers:
        return held_LX
    routing_MX = held_LX.new_zeros(layers, held_LX.shape[1])
    for layer, held_X in zip(state.router_biases, held_LX, strict=True):
        routing_MX[layer].copy_(held_X)
    return routing_MX


def enter(state: TrainState, stage: CurriculumStage) -> None:
    """Train by a curriculum stage from now on; nothing happens if it is the present one."""
    if state.curriculum_stage == stage:
        return
    objective = objective_of(stage.objective)
    state.weigher = None if objective is None else Weigher(objective)
    if state.reference is not None and state.reference.first_step != stage.first_step:
        state.reference = None
    for part in state.stages.values():
        let_learn(part.model, stage)
        part.weigh = None if state.weigher is None else state.weigher.weigh
        part.temperature = 1.0 if objective is None else objective.temperature
    state.curriculum_stage = stage


def let_learn(model: KimiVL, stage: CurriculumStage) -> None:
    """Freeze all parts but those that learn in a curriculum stage, with adapters all but these; set its rotary theta.

    Frozen parameters require no gradient, so none is made: their place in the buffers stays zero, and adds nothing to
    norm and clipping.
    """
    decoder = model.language_model.model
    decoder.rope_theta = model.shape.decoder.rope_theta if stage.rope_theta is None else stage.rope_theta
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(learner_of(name) in stage.learners and is_trained(model, name))


def update(
    state: TrainState,
    total: GlobalStep,
    settings: OptimizerSettings,
    *,
    rate: float,
    learned: Mapping[Learner, int] | None = None,
) -> None:
    """Take the optimizer's step and, without adapters, move the router's biases: the same on every rank.

    Parameters that other ranks update are still in flight when it returns (``settle``).

    Args:
        state: With summed gradients.
        total: What the ranks agreed on.
        settings: Of the optimizer.
        rate: Learning rate of the step.
        learned: How often each part that learns has learned, including this step; None: all of them, at every step.
    """
    scale = gradient_scale(total, norm_max=settings.gradient_norm_max)
    updated = None if state.zero1 is None else state.zero1.gather
    state.optimizer.step(learning_rate=rate, gradient_scale=scale, learned=learned, updated=updated)
    # Beside frozen weights, or where answers are compared with a reference's, they stay: no gradient would show it.
    moves = state.adapters is None and state.weigher is None
    if moves and (learned is None or Learner.DECODER in learned):
        load_ME = Routing.from_numbers(total.routing_MX).load_LE
        # One by one: a list as an index would be copied to the device, and waited for.
        held_LE = torch.stack([load_ME[layer] for layer in state.router_biases]) if state.router_biases else load_ME[:0]
        update_router_biases(list(state.router_biases.values()), held_LE, rate=settings.router_bias_rate)
    state.step += 1


def settle(state: TrainState) -> None:
    """Wait until parameters and state are up to date with the last step; call it before reading them."""
    if state.zero1 is not None:
        state.zero1.settle()
    state.optimizer.settle()


def reduce(state: TrainState, local: LocalStep, meshes: Meshes) -> GlobalStep:
    """Agree with all ranks on gradients, loss, counts, loads and requests."""
    if state.zero1 is not None:
        return reduce_zero1(state.flat, state.zero1, local, meshes)
    return reduce_step(state.flat, local, meshes)
