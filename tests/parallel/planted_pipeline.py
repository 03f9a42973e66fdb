"""Bugs that are planted into a pipeline of this process, so that comparing with one process can be seen to notice."""

from __future__ import annotations

import dataclasses
from typing import Any

from polyreme_trainer.parallel import gradients, pipeline
from polyreme_trainer.train import state as state_module


def plant(bug: str | None) -> None:
    """Break this process."""
    if bug == "the loss is divided by the microbatches":
        vars(pipeline)["_loss_of"] = lambda loss_sum, _number: loss_sum / 4
    if bug == "a microbatch runs twice and another never":
        real_run = pipeline.Scheduled.run
        vars(pipeline)["Scheduled"].run = lambda self, microbatches: real_run(
            self, [microbatches[1], *microbatches[1:]]
        )
    if bug == "the norm knows this stage alone":
        real_sum = gradients._sum_stages

        def without_norms(piggybacked: Any, meshes: Any) -> None:
            own = piggybacked.clone()
            real_sum(piggybacked, meshes)
            for place in (gradients._SLICED_SQUARE, gradients._DENSE_SQUARE):
                piggybacked[place] = own[place]

        vars(gradients)["_sum_stages"] = without_norms
    if bug == "later stages are named one layer too low":
        real_sections = pipeline.held_sections

        def shifted(*arguments: Any) -> Any:
            return {
                stage: dataclasses.replace(
                    part, layers=range(part.layers.start - (stage > 0), part.layers.stop - (stage > 0))
                )
                for stage, part in real_sections(*arguments).items()
            }

        vars(state_module)["held_sections"] = shifted
    if bug == "a stage's loads stand at another stage's layers":
        real_routing = state_module._routing
        vars(state_module)["_routing"] = lambda state: real_routing(state).roll(1, 0)
