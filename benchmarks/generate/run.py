"""The engine beside transformers' ``generate``: same decoder and weights, float32, one thread, in turns.

And weights in 4 bits beside the same in bfloat16, on two layers as wide as half of Kimi-VL's.

Usage: run.py [--rounds 3] [--prompts 64] [--rows 32] [--prompt 64] [--shortest 16] [--longest 512]

Each prompt gets an answer of a length that is drawn. transformers decodes batches until the longest answer of a batch
has its length, as it must for answers that end at different tokens; what it makes beyond an answer is not counted.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from polyreme_planner.latent_cache import CacheKind, token_bytes
from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO, NO_VISION, DecoderShape
from polyreme_trainer.export.config import text_config
from polyreme_trainer.export.names import text_part
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.moe import Router
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.serve.engine import Engine, EngineSettings, Request
from polyreme_trainer.serve.int4 import pack, weights_bytes

SHAPE = dataclasses.replace(KIMI_VL_NANO, vision=NO_VISION)
MEDIA, PAD, NEVER = 1, 0, -1
EXPANDED_BYTES = 4
"""Of a number of keys and values, as earlier releases kept them."""
WIDE = dataclasses.replace(
    KIMI_VL_A3B,
    vision=NO_VISION,
    decoder=dataclasses.replace(
        KIMI_VL_A3B.decoder,
        vocabulary=512,
        width=1024,
        layers=2,
        experts=16,
        dense_ffn_width=5632,
        expert_ffn_width=704,
    ),
)
WIDE_ROWS, WIDE_TOKENS = 8, 32
BAR = {"over_transformers_ratio": 2.5, "cache_bytes_ratio": 0.07, "int4_time_ratio": 1.0, "int4_bytes_ratio": 0.37}
AT_LEAST = ("over_transformers_ratio",)


@dataclasses.dataclass(frozen=True)
class Asked:
    """A prompt of text, and the length of its answer."""

    prompt_tokens: Sequence[int]
    answer_tokens: int
    patches_PC: Any = dataclasses.field(default_factory=lambda: np.zeros((0, 0), np.uint8))
    grids_I2: Any = dataclasses.field(default_factory=lambda: np.zeros((0, 2), np.int32))


Side = Callable[[Sequence[Asked]], list[list[int]]]


def main() -> int:
    """Compare; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rows", type=int, default=32, help="answers at once, of both sides")
    parser.add_argument("--prompt", type=int, default=64, help="tokens")
    parser.add_argument("--shortest", type=int, default=16, help="answer [tokens]")
    parser.add_argument("--longest", type=int, default=512, help="answer [tokens]")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    model = build_model(SHAPE, seed=3, media_token=MEDIA).eval()
    sides: dict[str, Side] = {"ours": ours(model, options.rows), "transformers": theirs(model, options.rows)}
    rounds = [measured(sides, drawn(options, seed)) for seed in range(options.rounds)]
    median = {name: statistics.median(taken[name] for taken in rounds) for name in rounds[0]}
    figures = {
        "over_transformers_ratio": round(median["transformers"] / median["ours"], 2),
        "cache_bytes_ratio": round(cache_bytes(CacheKind.AUTO) / expanded_bytes(KIMI_VL_A3B.decoder), 4),
        "int8_cache_bytes_ratio": round(cache_bytes(CacheKind.INT8) / expanded_bytes(KIMI_VL_A3B.decoder), 4),
        "same_tokens_share": round(median["same"], 4),
        "tokens_per_cpu_s": round(1 / median["ours"]),
        "padding_ratio": round(median["padding"], 2),
        **int4_beside_bfloat16(options.rounds),
    }
    ok = all(figures[name] >= bar if name in AT_LEAST else figures[name] <= bar for name, bar in BAR.items())
    sys.stdout.write(json.dumps({"name": "bench-generate", "figures": figures, "bar": BAR, "ok": ok}) + "\n")
    return 0 if ok else 1


def int4_beside_bfloat16(rounds: int) -> dict[str, float]:
    """Return processor time and bytes of weights in 4 bits over those of the same in bfloat16."""
    models = [build_model(WIDE, seed=3, media_token=MEDIA, dtype=torch.bfloat16).eval() for _ in range(2)]
    for model in models:
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.float()
    pack(models[1])
    draw = np.random.default_rng(0)
    asked = [Asked(draw.integers(2, 512, WIDE_TOKENS).tolist(), WIDE_TOKENS) for _ in range(WIDE_ROWS)]
    taken: list[list[float]] = [[], []]
    for _ in range(rounds):
        for model, of in zip(models, taken, strict=True):
            begun_s = time.process_time()
            ours(model, WIDE_ROWS)(asked)
            of.append(time.process_time() - begun_s)
    full_bytes, int4_bytes = (weights_bytes(model) for model in models)
    return {
        "int4_time_ratio": round(statistics.median(taken[1]) / statistics.median(taken[0]), 2),
        "int4_bytes_ratio": round(int4_bytes / full_bytes, 3),
    }


def drawn(options: argparse.Namespace, seed: int) -> list[Asked]:
    """Draw prompts and lengths."""
    draw = np.random.default_rng(seed)
    lengths = draw.integers(options.shortest, options.longest, options.prompts, endpoint=True)
    words = SHAPE.decoder.vocabulary
    return [Asked(draw.integers(2, words, options.prompt).tolist(), int(length)) for length in lengths]


def measured(sides: Mapping[str, Side], asked: Sequence[Asked]) -> dict[str, float]:
    """Return processor seconds a token of each side, and the share of tokens on which they agree."""
    wanted = [one.answer_tokens for one in asked]
    taken: dict[str, float] = {}
    answers: dict[str, list[list[int]]] = {}
    for name, side in sides.items():
        begun_s = time.process_time()
        answers[name] = side(asked)
        taken[name] = (time.process_time() - begun_s) / sum(wanted)
    same = sum(common(*both) for both in zip(*answers.values(), strict=True))
    return {**taken, "same": same / sum(wanted), "padding": len(wanted) * max(wanted) / sum(wanted)}


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Tokens up to the first difference: after it both answer something else."""
    return next((place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1]), len(one))


def ours(model: KimiVL, rows: int) -> Side:
    """Return the engine's way."""

    def answer(asked: Sequence[Asked]) -> list[list[int]]:
        pages = sum(-(-(len(one.prompt_tokens) + one.answer_tokens) // 16) for one in asked)
        engine = Engine(model, EngineSettings(pages=pages, rows_max=rows))
        answers: dict[int, list[int]] = {
            engine.add(Request(prompt=one, new_tokens_max=one.answer_tokens, stop_token=NEVER)): [] for one in asked
        }
        while not engine.idle:
            for made in engine.step():
                answers[made.request].append(made.token)
        return list(answers.values())

    return answer


def theirs(model: KimiVL, rows: int) -> Side:
    """Return transformers' way: batches of rows, each until its longest answer is whole."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    ways: dict[str, Any] = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    peer: Any = DeepseekV3ForCausalLM(DeepseekV3Config(**text_config(SHAPE.decoder), **ways)).eval()
    peer.load_state_dict(text_part(model.state_dict()), strict=True)

    def answer(asked: Sequence[Asked]) -> list[list[int]]:
        answers = []
        for begin in range(0, len(asked), rows):
            batch = asked[begin : begin + rows]
            longest = max(one.answer_tokens for one in batch)
            tokens_BT = torch.tensor([one.prompt_tokens for one in batch])
            with torch.no_grad():
                made_BT = peer.generate(
                    tokens_BT,
                    attention_mask=torch.ones_like(tokens_BT),
                    do_sample=False,
                    min_new_tokens=longest,
                    max_new_tokens=longest,
                    pad_token_id=PAD,
                )
            new_BT = made_BT[:, tokens_BT.shape[1] :].tolist()
            answers += [tokens[: one.answer_tokens] for one, tokens in zip(batch, new_BT, strict=True)]
        return answers

    return answer


def cache_bytes(kind: CacheKind) -> int:
    """Bytes that a token of Kimi-VL takes in a layer."""
    return token_bytes(KIMI_VL_A3B.decoder, kind, number_bytes=2)


def expanded_bytes(shape: DecoderShape) -> int:
    """Bytes of the keys and values of all heads."""
    return shape.heads * (shape.query_dim + shape.value_dim) * EXPANDED_BYTES


if __name__ == "__main__":
    sys.exit(main())
