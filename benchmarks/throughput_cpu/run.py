"""Tokens a second of one process beside transformers: the same decoder, weights and tokens, one thread, in turns.

Each side runs in a process of its own, since glibc reads its settings once: ours with those that the launcher gives to
ranks, transformers with none, as its users start it, and a second time with ours.

Usage: run.py [--rounds 15] [--steps 4] [--tokens 128] [--documents 8]
       run.py --operators [--steps 4]   processor time of a step, and shares of its operations by torch's profiler
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from polyreme_api.batch import IGNORED_TARGET
from polyreme_datahub.objects import open_store
from polyreme_launcher.rank_processes import ALLOCATOR
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO, NO_VISION, ModelShape
from polyreme_trainer.export.config import text_config
from polyreme_trainer.export.names import text_part
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.gradients import GlobalStep
from polyreme_trainer.parallel.world import RankSettings, World, open_world
from polyreme_trainer.train.inputs import Inputs
from polyreme_trainer.train.settings import CheckpointSettings, OptimizerSettings, TrainSettings
from polyreme_trainer.train.state import TrainState, backward, open_state, reduce, update

BAR = {"ratio_to_transformers": 1.3, "wider_ratio_to_transformers": 1.15}
"""README.md says why the second is out of reach."""
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
"""Where products take longer than what calls them."""

MODELS = {"nano": NANO, "wider": WIDER}
KINDS = {
    "products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm", "aten::addmm_"),
    "squares": ("aten::pow", "aten::linalg_vector_norm"),
    "optimizer": ("aten::_fused_adamw_",),
}
"""Operations of each kind; the profiler's names."""
SIDES = {"ours": ("ours", ALLOCATOR), "theirs": ("theirs", {}), "theirs_with_our_allocator": ("theirs", ALLOCATOR)}
"""What runs in each process, and what is added to its environment."""

Step = Callable[[], float]
"""Trains a step; returns its loss."""


def main() -> int:
    """Compare on both models; 0 when both bars are met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=4, help="steps of each in a round")
    parser.add_argument("--tokens", type=int, default=128, help="of a document")
    parser.add_argument("--documents", type=int, default=8, help="of a step")
    parser.add_argument("--operators", action="store_true", help="shares of a step by kind of operation, and end")
    parser.add_argument("--serve", nargs=2, metavar=("SIDE", "MODEL"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        side, model = options.serve
        return serve(side, model, options)
    if options.operators:
        return show_operators(options)
    figures = compare("nano", options)
    figures |= {f"wider_{name}": value for name, value in compare("wider", options).items()}
    ok = all(figures[name] >= least for name, least in BAR.items())
    report = {"name": "bench-throughput-cpu", "figures": figures, "bar": BAR, "ok": ok}
    sys.stdout.write(json.dumps(report) + "\n")
    return 0 if ok else 1


def compare(model: str, options: argparse.Namespace) -> dict[str, float]:
    """Time all sides in turns; medians over rounds."""
    with contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(Side.started(name, model, options)) for name in SIDES}
        difference = max(check_losses(sides["ours"].loss, side.loss) for side in sides.values())
        for side in sides.values():
            side.timed(WARM_STEPS)
        rounds = [{name: side.timed(options.steps) for name, side in sides.items()} for _ in range(options.rounds)]

    def ratios(other: str) -> list[float]:
        return [taken[other] / taken["ours"] for taken in rounds]

    def tokens_per_s(side: str) -> float:
        step_s = statistics.median(taken[side] for taken in rounds)
        return round(float(options.documents * options.tokens) / step_s, 1)

    return {
        "ratio_to_transformers": round(statistics.median(ratios("theirs")), 3),
        "lowest_ratio_of_a_round": round(min(ratios("theirs")), 3),
        "ratio_to_transformers_with_our_allocator": round(statistics.median(ratios("theirs_with_our_allocator")), 3),
        "tokens_per_s": tokens_per_s("ours"),
        "transformers_tokens_per_s": tokens_per_s("theirs"),
        "transformers_with_our_allocator_tokens_per_s": tokens_per_s("theirs_with_our_allocator"),
        "parameters": sides["ours"].parameters,
        "relative_loss_difference": difference,
    }


def show_operators(options: argparse.Namespace) -> int:
    """Print processor time of a step and the shares of its operations, of both sides with our allocator."""
    figures: dict[str, float] = {}
    for model in MODELS:
        for name in ("ours", "theirs_with_our_allocator"):
            with Side.started(name, model, options, "--operators") as side:
                figures |= {f"{model}_{name}_{key}": value for key, value in side.read().items()}
    sys.stdout.write(json.dumps({"name": "bench-throughput-cpu-operators", "figures": figures}) + "\n")
    return 0


def operators(step: Step, steps: int) -> dict[str, float]:
    """Processor time of a step, and the shares of its operations by kind."""
    for _ in range(WARM_STEPS):
        step()
    begun_s = time.process_time()
    for _ in range(steps):
        step()
    cpu_s = (time.process_time() - begun_s) / steps
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        for _ in range(steps):
            step()
    spent_us = {event.key: event.self_cpu_time_total for event in profiler.key_averages()}
    whole_us = sum(spent_us.values())
    shares = {kind: sum(spent_us.get(name, 0.0) for name in names) / whole_us for kind, names in KINDS.items()}
    return {"cpu_s": round(cpu_s, 4)} | {f"{kind}_share": round(share, 3) for kind, share in shares.items()}


class Side:
    """A process that trains steps when it is asked to."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process
        said = self.read()
        self.loss: float = said["loss"]
        """Of its first step."""
        self.parameters: int = said["parameters"]

    @classmethod
    @contextlib.contextmanager
    def started(cls, name: str, model: str, options: argparse.Namespace, *flags: str) -> Iterator[Side]:
        """Start one, and end it."""
        side, allocator = SIDES[name]
        sizes = [f"--tokens={options.tokens}", f"--documents={options.documents}", f"--steps={options.steps}", *flags]
        plain = {variable: value for variable, value in os.environ.items() if not variable.startswith("MALLOC_")}
        with subprocess.Popen(
            [sys.executable, __file__, *sizes, "--serve", side, model],
            env=plain | allocator,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        ) as process:
            try:
                yield cls(process)
            finally:
                process.kill()

    def timed(self, steps: int) -> float:
        """Seconds of a step."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{steps}\n")
        self._process.stdin.flush()
        return float(self.read()["step_s"])

    def read(self) -> dict[str, Any]:
        """Read the next line that it says."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit("a side ended before it answered; its error is above")
        return dict(json.loads(line))


def serve(side: str, model: str, options: argparse.Namespace) -> int:
    """Train one step and say its loss; then so many as each line of the input asks for, and say what one took."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    shape = MODELS[model]
    generator = torch.Generator().manual_seed(0)
    size = (options.documents, options.tokens)
    tokens_BS = torch.randint(2, shape.decoder.vocabulary, size, generator=generator)
    with contextlib.ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        server = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        settings = settings_of(shape, Path(folder), server)
        weights = build_model(shape, seed=settings.seed, media_token=MEDIA)
        parameters = sum(parameter.numel() for parameter in weights.parameters())
        if side == "ours":
            world = stack.enter_context(open_world(settings.rank, settings.layout))
            step = our_step(open_state(settings, world.meshes, media_token=MEDIA), world, tokens_BS, settings.optimizer)
        else:
            step = transformers_step(shape, weights, tokens_BS, settings.optimizer)
        del weights
        sys.stdout.write(json.dumps({"loss": step(), "parameters": parameters}) + "\n")
        sys.stdout.flush()
        if options.operators:
            sys.stdout.write(json.dumps(operators(step, options.steps)) + "\n")
            return 0
        for line in sys.stdin:
            sys.stdout.write(json.dumps({"step_s": timed(step, int(line))}) + "\n")
            sys.stdout.flush()
    return 0


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
        raise SystemExit(f"losses differ: {own} and {other}, by {difference:.1e}, expected at most {LOSS_TOLERANCE}")
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


def transformers_step(shape: ModelShape, weights: KimiVL, tokens_BS: Tensor, optimizer: OptimizerSettings) -> Step:
    """A step of ``DeepseekV3ForCausalLM``: a batch without padding, grouped products, fused AdamW, clipping."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ways: dict[str, Any] = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**text_config(shape.decoder), **ways))
    chosen = (model.config._attn_implementation, model.config._experts_implementation)  # noqa: SLF001 - no public name
    if chosen != tuple(ways.values()):
        raise SystemExit(f"transformers runs {chosen}, it was asked for {tuple(ways.values())}")
    model.load_state_dict(text_part(weights.state_dict()), strict=True)
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
