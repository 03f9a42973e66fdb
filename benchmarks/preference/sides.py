"""The sides of bench-preference, each in a process of its own: ours in three ways, and TRL's DPOTrainer.

A side first writes, for each loss, its value and gradient of the first step; then it trains so many steps as each line
of its input asks for, and says what one took.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import socket
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.preference import drawn
from benchmarks.preference.pairs import SHAPE, Pairs, draw, packed

from polyreme_api.job.objective import Objective
from polyreme_datahub.objects import open_store
from polyreme_planner.curriculum import CurriculumStage
from polyreme_planner.layout import Layout
from polyreme_trainer.export.config import text_config
from polyreme_trainer.export.names import text_part
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.parallel.world import RankSettings, World, open_world
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings
from polyreme_trainer.train.state import TrainState, backward, enter, open_state, reduce, update

RATE = 1e-5
MEDIA, END = 1, 0
BETA = "0.1"
LOSSES: Mapping[str, Mapping[str, Any]] = {
    "Sigmoid": {"loss_type": ["sigmoid"]},
    "SigmoidNorm": {"loss_type": ["sigmoid_norm"]},
    "IPO": {"loss_type": ["ipo"]},
}
"""By our names, as TRL's settings."""
OURS = ("shared", "apart", "text")
SIDES = (*OURS, "trl")

Step = Callable[[], float]


def main() -> int:
    """Serve one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("side", choices=SIDES)
    parser.add_argument("folder", type=Path)
    for name in ("pairs", "prompt", "answer"):
        parser.add_argument(f"--{name}", type=int, required=True)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    pairs = draw(options)
    weights = build_model(SHAPE, seed=3, media_token=MEDIA)
    with contextlib.ExitStack() as stack:
        if options.side == "trl":
            step = stack.enter_context(trl_step(weights, pairs, options.folder))
        else:
            step = stack.enter_context(our_step(weights, pairs, options.side, options.folder))
        _say({"ready": True})
        for line in sys.stdin:
            _say(timed(step, int(line)))
    return 0


def _say(what: Mapping[str, Any]) -> None:
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


def timed(step: Step, steps: int) -> dict[str, float]:
    """Wall and processor time of a step."""
    begun_s, cpu_s = time.perf_counter(), time.process_time()
    for _ in range(steps):
        step()
    return {"step_s": (time.perf_counter() - begun_s) / steps, "cpu_s": (time.process_time() - cpu_s) / steps}


@contextlib.contextmanager
def our_step(weights: KimiVL, pairs: Pairs, way: str, folder: Path) -> Iterator[Step]:
    """A step as the loop of a rank takes it, with cached scores."""
    with (
        tempfile.TemporaryDirectory() as root,
        socket.create_server(("127.0.0.1", 0)) as server,
        open_world(_rank(server), Layout()) as world,
    ):
        settings = _settings(world, root)
        state = open_state(settings, world.meshes, media_token=MEDIA)
        _copy(state, weights)
        if way == "shared":
            for loss in LOSSES:
                _keep(_first(state, world, _enter(state, pairs, way, loss)), folder / f"ours-{loss}.pt")
            for aggregation in drawn.LOSSES:
                enter(state, CurriculumStage(steps=1, name=aggregation, objective=drawn.objective(aggregation)))
                found = _first(state, world, drawn.our_inputs(pairs, aggregation))
                _keep(found, folder / f"ours-{aggregation}.pt")
        inputs = _enter(state, pairs, way, "Sigmoid")

        def step() -> float:
            total = reduce(state, backward(state, inputs), world.meshes)
            update(state, total, settings.optimizer, rate=RATE)
            return total.loss

        yield step


def _rank(server: socket.socket) -> RankSettings:
    return RankSettings(rank=0, world=1, attempt=1, master_port=server.getsockname()[1], master_fd=server.detach())


def _settings(world: World, root: str) -> TrainSettings:
    stage = CurriculumStage(steps=1_000_000, objective=_objective("Sigmoid"))
    return TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=world.meshes.layout,
        shape=SHAPE,
        steps=1_000_000,
        curriculum=(stage,),
        checkpoint=CheckpointSettings(store=open_store(Path(root).as_uri())),
    )


def _objective(loss: str) -> Objective:
    return Objective.model_validate({"kind": "Preference", "loss": loss, "beta": BETA})


def _copy(state: TrainState, weights: KimiVL) -> None:
    with torch.no_grad():
        for name, parameter in state.models[0].named_parameters():
            parameter.copy_(weights.get_parameter(name))


def _enter(state: TrainState, pairs: Pairs, way: str, loss: str) -> Inputs:
    objective = Objective() if way == "text" else _objective(loss)
    enter(state, CurriculumStage(steps=1_000_000, name=loss, objective=objective))

    def reference(samples_B2: Any) -> Any:
        return pairs.reference[samples_B2[:, 1], np.arange(len(samples_B2)) % 2]

    return to_inputs(packed(pairs, way=way), device="cpu", media_token=MEDIA, reference=reference)


def _first(state: TrainState, world: World, inputs: Inputs) -> tuple[float, dict[str, Any]]:
    total = reduce(state, backward(state, inputs), world.meshes)
    gradients = {
        slot.name: slot.view(part.gradients).clone() / total.counted for part in state.flat.parts for slot in part.slots
    }
    return total.loss, text_part(gradients)


def _keep(found: tuple[float, dict[str, Any]], file: Path) -> None:
    torch.save({"loss": found[0], "gradients": found[1]}, file)


@contextlib.contextmanager
def trl_step(weights: KimiVL, pairs: Pairs, folder: Path) -> Iterator[Step]:
    """A step of TRL's trainer without its loop: loss of a collated batch with cached scores, clipping, fused AdamW."""
    os.environ["ACCELERATE_USE_CPU"] = "1"
    for loss in LOSSES:
        trainer, batch = _trainer(weights, pairs, loss)
        _keep(_theirs(trainer.model, trainer.compute_loss(trainer.model, batch)), folder / f"trl-{loss}.pt")
    for aggregation in drawn.LOSSES:
        model = _exported(weights)
        value = drawn.their_loss(model, _tokenizer(), pairs, aggregation)
        _keep(_theirs(model, value), folder / f"trl-{aggregation}.pt")
    trainer, batch = _trainer(weights, pairs, "Sigmoid")
    adam = torch.optim.AdamW(trainer.model.parameters(), lr=RATE, fused=True)

    def step() -> float:
        value = trainer.compute_loss(trainer.model, batch)
        value.backward()
        torch.nn.utils.clip_grad_norm_(trainer.model.parameters(), 1.0)
        adam.step()
        adam.zero_grad()
        return float(value)

    yield step


def _theirs(model: Any, value: Any) -> tuple[float, dict[str, Any]]:
    value.backward()
    return float(value), {name: parameter.grad for name, parameter in model.named_parameters()}


def _exported(weights: KimiVL) -> Any:
    """Load the exported model in transformers."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ways: dict[str, Any] = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    model: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**text_config(SHAPE.decoder), **ways))
    model.load_state_dict(text_part(weights.state_dict()), strict=True)
    return model


def _tokenizer() -> Any:
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(tokenizer_object=_words(), pad_token="w0", eos_token="w0")


def _trainer(weights: KimiVL, pairs: Pairs, loss: str) -> tuple[Any, Any]:
    """TRL's trainer over the exported model, and its batch of the pairs."""
    import datasets
    from trl import DPOConfig, DPOTrainer

    model, tokenizer = _exported(weights), _tokenizer()
    rows = [
        {"prompt": _text(prompt), "chosen": " " + _text(chosen), "rejected": " " + _text(rejected)}
        for prompt, chosen, rejected in zip(pairs.prompts, pairs.chosen, pairs.rejected, strict=True)
    ]
    arguments = DPOConfig(
        output_dir=tempfile.mkdtemp(),
        beta=float(BETA),
        precompute_ref_log_probs=True,
        max_length=None,
        report_to=[],
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        disable_dropout=True,
        per_device_train_batch_size=len(rows),
        **LOSSES[loss],
    )
    trainer = DPOTrainer(
        model, args=arguments, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer
    )
    ids = [
        {"prompt_ids": prompt, "chosen_ids": chosen, "rejected_ids": rejected}
        for prompt, chosen, rejected in zip(pairs.prompts, pairs.chosen, pairs.rejected, strict=True)
    ]
    batch = trainer.data_collator(ids)
    reference = torch.from_numpy(pairs.reference).float()
    batch |= {"ref_chosen_logps": reference[:, 0], "ref_rejected_logps": reference[:, 1]}
    trainer.model.train()
    return trainer, batch


def _words() -> Any:
    """A tokenizer of one token a word, so that texts are exactly the ids."""
    import tokenizers

    words = {f"w{number}": number for number in range(SHAPE.decoder.vocabulary)}
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w1"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return made


def _text(ids: list[int]) -> str:
    return " ".join(f"w{number}" for number in ids)


if __name__ == "__main__":
    raise SystemExit(main())
