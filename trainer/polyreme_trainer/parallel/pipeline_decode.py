"""Decoding through the stages of a pipeline, one after another: implements the model's ``DecodePipeline``.

A stream goes from rank to rank. As many streams as there are ranks are under way, so that the ranks work at the same
time; each rank only needs memory for the latents of its own layers.

Legend: S rows of the stream, D decoder width, B rows that answer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel import collectives


class PipelineDecoder:
    """Passes a stream through the stages of a pipeline group."""

    def __init__(self, models: Mapping[int, KimiVL], rank_of: Sequence[int], group: dist.ProcessGroup) -> None:
        """Hold this rank's stages.

        Args:
            models: What of the model each of this rank's stages holds.
            rank_of: Which rank of the group holds each stage.
            group: Ranks of the pipeline.
        """
        self._models = models
        self._rank_of = rank_of
        self._group = group
        self._rank = dist.get_rank(group)
        self.groups = dist.get_world_size(group)

    @property
    def stages(self) -> list[KimiVL]:
        """Parts of the model that this rank holds."""
        return list(self._models.values())

    def through(
        self, rows: int, begin: Callable[[KimiVL], Tensor], run: Callable[[KimiVL, Tensor], Tensor]
    ) -> Tensor | None:
        """Run this rank's stages in order."""
        stream_SD: Tensor | None = None
        last = len(self._rank_of) - 1
        for number, model in sorted(self._models.items()):
            if number == 0:
                stream_SD = begin(model)
            elif stream_SD is None or self._rank_of[number - 1] != self._rank:
                stream_SD = model.like.new_empty((rows, model.shape.decoder.width))
                collectives.receive(stream_SD, self._rank_of[number - 1], self._group)
            stream_SD = run(model, stream_SD)
            if number < last and self._rank_of[number + 1] != self._rank:
                collectives.send(stream_SD, self._rank_of[number + 1], self._group)
        return stream_SD if last in self._models else None

    def share(self, rows: int, choose: Callable[[], Tensor] | None) -> Tensor:
        """Broadcast what the last stage's rank chose."""
        device = next(iter(self._models.values())).like.device
        chosen_B2 = torch.empty((rows, 2), dtype=torch.float64, device=device) if choose is None else choose()
        collectives.from_rank(chosen_B2, self._rank_of[-1], self._group)
        return chosen_B2
