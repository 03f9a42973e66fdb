"""A second copy of the weights, in the layout in which ranks draw answers where that is another than training's.

Ranks are then data-parallel: each holds all layers, and ``ep`` neighbours share the experts. So a token waits for
no pipeline and no tensor-parallel sum, and no parameter is gathered for it.
"""

from __future__ import annotations

import dataclasses
import logging

import torch.distributed as dist
from torch import Tensor

from polyreme_planner.curriculum import generation_layout
from polyreme_planner.layout import Layout
from polyreme_planner.memory import size_words
from polyreme_trainer.checkpoint.shards import HeldTensor
from polyreme_trainer.model.initialise import STACKED, build_model, open_buffers
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.communicators import Operation, Wanted
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.flat_buffers import Slices
from polyreme_trainer.parallel.mesh import Meshes, experts_of, group_ranks, sparse_place
from polyreme_trainer.train.checkpoint_content import computed_content, slice_shard
from polyreme_trainer.train.rollouts.resharding import Resharding
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, hold_frozen, router_biases

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GenerationGroups:
    """This rank's groups in the layout of draws."""

    layout: Layout
    rank: int
    ep_group: dist.ProcessGroup
    world_group: dist.ProcessGroup
    """All ranks, for the exchange of weights."""


def open_generation_groups(settings: TrainSettings, meshes: Meshes) -> GenerationGroups | None:
    """Open the groups of a layout of draws; every rank calls it. None: answers are drawn in training's layout."""
    layout = generation_layout((stage.objective for stage in settings.curriculum_stages), world=settings.layout.world)
    if layout is None:
        return None
    groups = meshes.communicators.open(
        [
            Wanted(
                name="generation_ep",
                ranks=group_ranks(layout, meshes.rank, ("ep",)),
                operations=frozenset({Operation.ROWS}),
            ),
            Wanted(
                name="generation_world",
                ranks=tuple(range(layout.world)),
                operations=frozenset({Operation.ROWS, Operation.SUM}),
            ),
        ]
    )
    return GenerationGroups(
        layout=layout, rank=meshes.rank, ep_group=groups["generation_ep"], world_group=groups["generation_world"]
    )


class GenerationModel:
    """The model that draws answers, and how it gets the weights in training."""

    def __init__(self, settings: TrainSettings, state: TrainState, meshes: Meshes, groups: GenerationGroups) -> None:
        """Take memory for the weights, which ``refresh`` fills; every rank calls it.

        Raises:
            InvalidConfigError: If experts do not fit the layout.
        """
        self.groups = groups
        self.model = _build(settings, groups, state.media_token)
        self._state = state
        self._used = False
        self.resharding = Resharding(
            computed_content(state).state_dict(),
            _tensors(self.model, groups),
            group=groups.world_group,
            control_group=meshes.control_group,
        )

    def agree(self, wanted: int) -> int:
        """Largest number among the ranks that share experts."""
        return collectives.largest_number(wanted, self.groups.ep_group)

    def refresh(self) -> None:
        """Take the weights as they are in training now; every rank calls it, after ``settle``.

        Raises:
            EnvironmentFailedError: On all ranks, if they differ afterwards.
        """
        trained = max(self._state.models.items())[1]
        self.model.language_model.model.rope_theta = trained.language_model.model.rope_theta
        self.resharding.exchange()
        if not self._used:
            size = size_words(self.resharding.received_bytes)
            _log.info("answers are drawn in layout %s: %s of weights come here in each step", self.groups.layout, size)
        self._used = True


def _build(settings: TrainSettings, groups: GenerationGroups, media_token: int) -> KimiVL:
    layout = groups.layout
    model = build_model(
        settings.shape,
        seed=settings.seed,
        media_token=media_token,
        experts_local=experts_of(layout, groups.rank, settings.shape.decoder.experts),
        dispatcher=AllToAllDispatcher(groups.ep_group) if layout.ep > 1 else None,
        device="meta",
    )
    hold_frozen(settings, model, [name for name, _ in model.named_parameters()])
    open_buffers(model, settings.rank.device_type)
    return model.eval()


def _tensors(model: KimiVL, groups: GenerationGroups) -> dict[str, Tensor]:
    """Name the model's tensors as a checkpoint does."""
    parameters = dict(model.named_parameters())
    experts = Slices(
        names=frozenset(name for name in parameters if name.endswith(STACKED)),
        place=sparse_place(groups.layout, groups.rank)["ep"],
        count=groups.layout.ep,
    )
    named: dict[str, Tensor] = {f"router_bias.{layer}": bias_E for layer, bias_E in router_biases(model).items()}
    for name, parameter in parameters.items():
        shard = slice_shard(name, experts=experts)
        held = list(shard.boxes(parameter.shape, 0, parameter.detach().view(-1)))
        whole = shard.whole_shape(parameter.shape)
        named[f"model.{name}"] = HeldTensor.of(held, whole) if shard.axes else parameter.detach()
    return named
