"""Ranks that send their weights to a layout of generation, and compare what comes with weights drawn for it."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.moe import LocalDispatcher
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.world import open_world
from polyreme_trainer.train.rollouts import generation_model, resharding
from polyreme_trainer.train.rollouts.generation_model import GenerationModel, open_generation_groups
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import open_state
from tests.parallel.pages import MEDIA

BUCKET_BYTES = 100_000


def reshard(request: Mapping[str, Any], rank: int, settings: TrainSettings) -> int:
    """Write the bytes that this rank received, in rounds of what size, and the names of tensors that are wrong."""
    vars(generation_model)["Resharding"] = functools.partial(resharding.Resharding, bucket_bytes=BUCKET_BYTES)
    largest = _watch()
    with open_world(settings.rank, settings.layout) as world:
        groups = open_generation_groups(settings, world.meshes)
        assert groups is not None
        state = open_state(settings, world.meshes, media_token=MEDIA)
        for layer, bias_E in state.router_biases.items():
            bias_E.add_(layer + 0.5)
        for model in state.models.values():
            model.language_model.model.rope_theta = 123.0
        copy = GenerationModel(settings, state, world.meshes, groups)
        if request.get("bug") == "bit flips on its way" and rank == 1:
            _flip()
        copy.refresh()
        assert copy.model.language_model.model.rope_theta == 123.0
        experts = copy.model.experts_local
        expected = build_model(
            settings.shape, seed=settings.seed, media_token=MEDIA, experts_local=experts, dispatcher=LocalDispatcher()
        ).state_dict()
        wrong = [
            name
            for name, tensor in copy.model.state_dict().items()
            if not torch.equal(tensor, expected[name].to(tensor.dtype) + _bias(name, settings))
        ]
        types = {str(tensor.dtype) for tensor in copy.model.state_dict().values()}
    found = {
        "wrong": wrong,
        "received": copy.resharding.received_bytes,
        "largest": max(largest),
        "types": sorted(types),
    }
    Path(request["root"], f"found-{rank}.json").write_text(json.dumps(found | {"rounds": len(largest)}))
    return 0


def _bias(name: str, settings: TrainSettings) -> float:
    if not name.endswith("e_score_correction_bias"):
        return 0.0
    return int(name.split(".")[3]) - settings.shape.decoder.dense_layers + 0.5


def _watch() -> list[int]:
    """Bytes of what this rank sends or receives at once."""
    sizes: list[int] = []
    real = collectives.exchange_rows

    def watched(rows: torch.Tensor, *, sent: list[int], received: list[int], group: Any) -> torch.Tensor:
        sizes.append(max(sum(sent), sum(received)) * rows.element_size())
        return real(rows, sent=sent, received=received, group=group)

    vars(collectives)["exchange_rows"] = watched
    return sizes


def _flip() -> None:
    """Change the last bit of one number that arrives."""
    real = collectives.exchange_rows

    def flipped(rows: torch.Tensor, **more: Any) -> torch.Tensor:
        arrived = real(rows, **more)
        if arrived.numel():
            arrived[:1].view(torch.int32)[0] ^= 1
        return arrived

    vars(collectives)["exchange_rows"] = flipped
