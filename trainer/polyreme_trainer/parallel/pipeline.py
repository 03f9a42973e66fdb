"""Run a step's microbatches through the stages of this rank: forward and backward, gradients added up in place.

The order of work is torch's own (``torch.distributed.pipelining``, unchanged), which sends streams forward and their
gradients back. Three things make it fit:

* **Every microbatch has the same number of tokens** (whole packs), since torch posts receives of a fixed shape. The
  image patches, which vary, are only seen by the first stage, on whose rank they are made.
* **The loss is a sum**, back-propagated as it is: torch scales nothing, and the reduction of the step divides once.
* **Microbatches are passed ready**, through ``_step_microbatches``: torch's public ``step`` would cut one batch along
  its first dimension, which packed documents with images do not have. The name is private; the version of torch is
  pinned, and no other module uses it.

Zero-bubble orders run the backward of a stage twice, first for the gradient of its input, then for those of its
weights. Exchanges between ranks belong to the first of these, except on the first stage, which has no input to wait for
and does both in the second. All ranks of an expert-parallel group hold the same stage and so follow the same table:
their exchanges meet.

Legend: S rows that a rank holds between stages, D decoder width.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.schedules import Schedule, chunks_of, ranks_of_stages
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.section import Section, sections, whole
from polyreme_trainer.model.stage import Microbatch, Stage
from polyreme_trainer.parallel.causes import unwrapped
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.rank_page import enter_stage, leave_stages


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSettings:
    """Stages and microbatches of a step, as planned."""

    schedule: Schedule | None = None
    """Order of work; None without stages."""
    layers: tuple[int, ...] = ()
    """Decoder layers of each stage, in order; empty without stages."""
    microbatches: int = 1
    """Microbatches of a data-parallel rank in a step."""


NO_STAGES = PipelineSettings()
"""The whole model, one microbatch."""


def stage_ranks(settings: PipelineSettings, ranks: int) -> tuple[int, ...]:
    """Return the rank of the pipeline that holds each stage.

    Raises:
        InvalidConfigError: If there is no schedule, or layers are given for another number of stages.
    """
    if ranks == 1:
        return (0,)
    if settings.schedule is None:
        raise InvalidConfigError(f"pipeline has no schedule: pp is {ranks}", field="spec.parallelism.schedule")
    rank_of = ranks_of_stages(settings.schedule, ranks, chunks_of(settings.schedule, ranks, len(settings.layers)))
    if len(settings.layers) != len(rank_of):
        raise InvalidConfigError(
            f"stages do not fit: layers are given for {len(settings.layers)} stages, schedule {settings.schedule} "
            f"has {len(rank_of)} over pp {ranks}"
        )
    return rank_of


def held_sections(settings: PipelineSettings, meshes: Meshes, shape: ModelShape) -> dict[int, Section]:
    """Return the stages of this rank, rising, and the section of the model of each.

    Raises:
        InvalidConfigError: If schedule, stages and layers do not fit the layout or the model.
    """
    if meshes.layout.pp == 1:
        return {0: whole(shape)}
    rank_of, place = stage_ranks(settings, meshes.layout.pp), meshes.place("pp")
    edges = itertools.pairwise(itertools.accumulate(settings.layers, initial=0))
    parts = sections(shape, list(edges))
    return {stage: part for stage, part in enumerate(parts) if rank_of[stage] == place}


class Pipeline(Protocol):
    """Runs microbatches; the parameters' gradients accumulate in place."""

    def run(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run forward and backward of every microbatch.

        Returns:
            Sum of their losses (scalar, without gradient): on ranks without the last stage zero.
        """
        ...


class OneStage:
    """The whole model on this rank: microbatches one after another."""

    def __init__(self, stage: Stage) -> None:
        self._stage = stage

    def run(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run forward and backward of each in order."""
        losses: list[Tensor] = []
        for number, microbatch in enumerate(microbatches):
            enter_stage(0, number)
            loss_sum = self._stage(microbatch=microbatch)
            loss_sum.backward()
            losses.append(loss_sum.detach())
        return losses[0] if len(losses) == 1 else torch.stack(losses).sum()


class Scheduled:
    """Some stages of several, in the order of a schedule."""

    def __init__(
        self,
        stages: dict[int, Stage],
        schedule: Schedule,
        *,
        count: int,
        group: dist.ProcessGroup,
        device: torch.device,
    ) -> None:
        """Hold the stages; the schedule is built when a step gives the size of its microbatches.

        Args:
            stages: This rank's, by their number.
            schedule: Order of work.
            count: Stages of the pipeline.
            group: Ranks of the pipeline, in order.
            device: Where streams are received.
        """
        self._stages = stages
        self._name = schedule
        self._count = count
        self._group = group
        self._device = device
        self._schedule: Any = None
        self._schedule_stages: list[Any] = []
        self._built_for: tuple[int, int] = (0, 0)

    def run(self, microbatches: Sequence[Microbatch]) -> Tensor:
        """Run forward and backward of every microbatch; all ranks of the group call it together.

        Raises:
            InvalidConfigError: If microbatches differ in tokens from each other.
        """
        size = self._size(microbatches)
        if size != self._built_for:
            # Packs change at the border of a curriculum stage: at the same step on every rank, so all rebuild together.
            self._schedule, self._built_for = self._build(*size), size
        losses: list[Tensor] = []
        for stage in self._schedule_stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        try:
            self._schedule._step_microbatches(  # noqa: SLF001 - torch 2.13 has no public name for ready microbatches
                kwarg_mbs=[{"microbatch": microbatch} for microbatch in microbatches],
                target_mbs=list(range(len(microbatches))),
                losses=losses,
                return_outputs=False,
            )
        except RuntimeError as error:
            # torch wraps what a stage raises; a wrong input must be reported as a wrong input, a lost peer as such.
            cause = unwrapped(error)
            raise cause from cause.__cause__
        leave_stages()
        return torch.stack([loss.detach() for loss in losses]).sum() if losses else torch.zeros((), device=self._device)

    def _size(self, microbatches: Sequence[Microbatch]) -> tuple[int, int]:
        tokens = {int(microbatch.tokens_T.shape[0]) for microbatch in microbatches}
        if len(tokens) != 1:
            raise InvalidConfigError(
                f"microbatches differ in tokens: seen {sorted(tokens)}, a pipeline's must be equal",
                field="spec.parallelism.microbatches",
            )
        return len(microbatches), tokens.pop()

    def _build(self, microbatches: int, tokens: int) -> Any:
        # Not at import: it takes 0.3 to 2 s, which a rank without stages must not pay at each restart.
        from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

        from polyreme_trainer.parallel.pipeline_stage import RecordedStage

        self._schedule_stages = [
            RecordedStage(
                stage,
                number,
                self._count,
                self._device,
                input_args=() if number == 0 else self._stream(stage, tokens),
                output_args=self._loss() if number == self._count - 1 else self._stream(stage, tokens),
                group=self._group,
            )
            for number, stage in sorted(self._stages.items())
        ]
        kind = get_schedule_class(str(self._name))
        single = issubclass(kind, PipelineScheduleSingle)
        built: Any = kind(
            self._schedule_stages[0] if single else self._schedule_stages,
            n_microbatches=microbatches,
            loss_fn=_loss_of,
            scale_grads=False,
        )
        return built

    def _stream(self, stage: Stage, tokens: int) -> Tensor:
        """Return an example of a stream: only its shape and type are read."""
        width = stage.model.shape.decoder.width
        return torch.empty(stage.rows(tokens), width, dtype=stage.model.like.dtype, device="meta", requires_grad=True)

    def _loss(self) -> Tensor:
        return torch.empty((), dtype=torch.float32, device="meta", requires_grad=True)


def _loss_of(loss_sum: Tensor, _number: int) -> Tensor:
    """The output of the last stage is its loss already."""
    return loss_sum


def open_pipeline(
    stages: dict[int, Stage], settings: PipelineSettings, meshes: Meshes, *, device: torch.device | str
) -> Pipeline:
    """Return the pipeline that runs this rank's stages, given by their number."""
    if settings.schedule is None or meshes.layout.pp == 1:
        return OneStage(stages[0])
    return Scheduled(
        stages,
        settings.schedule,
        count=len(settings.layers),
        group=meshes.pp_group,
        device=torch.device(device),
    )
