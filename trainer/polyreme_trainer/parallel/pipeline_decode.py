"""Decoding through the stages of a pipeline, one after another: implements the model's ``DecodePipeline``.

A stream goes from rank to rank, and while one rank works the others wait: decoding held-out questions is a small part
of a run, and each rank only needs memory for the keys and values of its own layers.

Legend: S rows of the stream, D decoder width, B prompts.
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

    def share_tokens(self, prompts: int, choose: Callable[[], Tensor] | None) -> Tensor:
        """Broadcast the last stage's tokens."""
        device = next(iter(self._models.values())).like.device
        token_B = torch.empty(prompts, dtype=torch.int64, device=device) if choose is None else choose()
        collectives.from_rank(token_B, self._rank_of[-1], self._group)
        return token_B
