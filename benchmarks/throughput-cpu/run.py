"""Tokens a second of one process beside transformers: the same decoder, weights and tokens, one thread, in turns.

Usage: run.py [--rounds 15] [--steps 4] [--tokens 128] [--documents 8]
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import socket
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polyreme_api.batch import IGNORED_TARGET
from polyreme_api.plan.layout import Layout
from polyreme_api.plan.shapes import KIMI_VL_NANO, NO_VISION, ModelShape
from polyreme_datahub.objects import open_store
from polyreme_trainer.export.config import text_config
from polyreme_trainer.export.names import text_part
from polyreme_trainer.parallel.gradients import GlobalStep
from polyreme_trainer.parallel.world import RankSettings, World, open_world
from polyreme_trainer.train.inputs import Inputs
from polyreme_trainer.train.settings import CheckpointSettings, OptimizerSettings, TrainSettings
from polyreme_trainer.train.state import TrainState, backward, open_state, reduce, update

RATIO_MIN = 1.2
LOSS_TOLERANCE = 1e-5
"""Largest difference of the first loss, relative to it: the same model, or nothing is compared."""
WARM_STEPS = 2
RATE = 1e-4
MEDIA = 1
NANO = dataclasses.replace(KIMI_VL_NANO, name="kimi-vl-nano, decoder", vision=NO_VISION)
WIDER = dataclasses.replace(
    NANO,
    name="four times as wide",
    decoder=dataclasses.replace(
        NANO.decoder,
        vocabulary=4096,
        width=384,
        dense_ffn_width=768,
        expert_ffn_width=256,
        experts=16,
        kv_rank=128,
        nope_dim=64,
        rope_dim=32,
        value_dim=64,
    ),
)
"""Printed beside: where products take longer than what calls them."""

Step = Callable[[], float]
"""Trains a step; returns its loss."""


def main() -> int:
    """Compare on both models; 0 when the bar is met on the preset."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    parser.add_argument("--tokens", type=int, default=128, help="of a document")
    parser.add_argument("--documents", type=int, default=8, help="of a step")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    figures = compare(NANO, options)
    figures |= {f"wider_{name}": value for name, value in compare(WIDER, options).items()}
    ok = figures["ratio_to_transformers"] >= RATIO_MIN
    report = {"name": "bench-throughput-cpu", "figures": figures, "bar": {"ratio_to_transformers": RATIO_MIN}, "ok": ok}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if ok else 1


def compare(shape: ModelShape, options: argparse.Namespace) -> dict[str, float]:
    """Time both in turns; medians over rounds."""
    generator = torch.Generator().manual_seed(0)
    size = (options.documents, options.tokens)
    tokens_BS = torch.randint(2, shape.decoder.vocabulary, size, generator=generator)
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        settings = settings_of(shape, Path(folder), server)
        with open_world(settings.rank, settings.layout) as world:
            state = open_state(settings, world.meshes, media_token=MEDIA)
            theirs = transformers_step(shape, state, tokens_BS, settings.optimizer)
            ours = our_step(state, world, tokens_BS, settings.optimizer)
            difference = check_losses(ours(), theirs())
            for step in (ours, theirs):
                timed(step, WARM_STEPS)
            rounds = [(timed(ours, options.steps), timed(theirs, options.steps)) for _ in range(options.rounds)]
    own_s, other_s = (statistics.median(times) for times in zip(*rounds, strict=True))
    return {
        "ratio_to_transformers": round(statistics.median(other / own for own, other in rounds), 3),
        "lowest_ratio_of_a_round": round(min(other / own for own, other in rounds), 3),
        "tokens_per_s": round(tokens_BS.numel() / own_s, 1),
        "transformers_tokens_per_s": round(tokens_BS.numel() / other_s, 1),
        "parameters": sum(parameter.numel() for parameter in state.models[0].parameters()),
        "relative_loss_difference": difference,
    }


def timed(step: Step, steps: int) -> float:
    """Seconds of a step."""
    begun_s = time.perf_counter()
    for _ in range(steps):
        step()
    return (time.perf_counter() - begun_s) / steps


def check_losses(own: float, other: float) -> float:
    """Refuse to compare two different models.

    Raises:
        SystemExit: If the losses of the same weights and tokens differ.
    """
    difference = abs(own - other) / other
    if difference > LOSS_TOLERANCE:
        raise SystemExit(f"losses differ: {own} and {other}, by {difference:.1e}, rule at most {LOSS_TOLERANCE}")
    return difference


def settings_of(shape: ModelShape, folder: Path, server: socket.socket) -> TrainSettings:
    """One rank, the whole model."""
    return TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1, master_port=server.getsockname()[1], master_fd=server.detach()),
        layout=Layout(),
        shape=shape,
        steps=1_000_000,
        checkpoint=CheckpointSettings(store=open_store(folder.as_uri())),
    )


def our_step(state: TrainState, world: World, tokens_BS: Tensor, optimizer: OptimizerSettings) -> Step:
    """A step as the loop of a rank takes it: one packed stream, gradients reduced and clipped, router biases moved."""
    targets_BS = torch.full_like(tokens_BS, IGNORED_TARGET)
    targets_BS[:, :-1] = tokens_BS[:, 1:]
    documents, tokens = tokens_BS.shape
    inputs = Inputs(
        tokens_T=tokens_BS.flatten(),
        targets_T=targets_BS.flatten(),
        positions_T=torch.arange(tokens).repeat(documents),
        document_offsets=list(range(0, tokens_BS.numel() + 1, tokens)),
        patches_PC=torch.zeros(0, 588),
        grids=[],
        unmasked=documents * (tokens - 1),
    )

    def step() -> float:
        total: GlobalStep = reduce(state, backward(state, inputs), world.meshes)
        update(state, total, optimizer, rate=RATE)
        return total.loss

    return step


def transformers_step(shape: ModelShape, state: TrainState, tokens_BS: Tensor, optimizer: OptimizerSettings) -> Step:
    """A step of ``DeepseekV3ForCausalLM``: a batch without padding, grouped products, fused AdamW, clipping."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ways = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**text_config(shape.decoder), **ways))
    chosen = (model.config._attn_implementation, model.config._experts_implementation)  # noqa: SLF001 - no public name
    if chosen != tuple(ways.values()):
        raise SystemExit(f"transformers runs {chosen}, it was asked for {tuple(ways.values())}")
    model.load_state_dict(text_part(state.models[0].state_dict()), strict=True)
    model.train()
    adam = torch.optim.AdamW(
        model.parameters(),
        lr=RATE,
        betas=(optimizer.beta1, optimizer.beta2),
        eps=optimizer.epsilon,
        weight_decay=optimizer.weight_decay,
        fused=True,
    )

    def step() -> float:
        loss = model(input_ids=tokens_BS, labels=tokens_BS, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), optimizer.gradient_norm_max)
        adam.step()
        adam.zero_grad()
        return float(loss)

    return step


if __name__ == "__main__":
    raise SystemExit(main())
