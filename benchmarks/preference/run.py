"""Preference training beside supervised training of the same tokens, and beside TRL: same model, one thread, in turns.

Usage: run.py [--rounds 7] [--steps 2] [--pairs 4] [--prompt 384] [--answer 96]

First both sides' loss and gradients are compared, for each loss of pairs, and for rewarded answers. Then, by processor
time of a step: with cached scores over supervised on the same tokens; pairs that share their prompt over pairs that
repeat it, divided by what the tokens let expect; and pairs a second over TRL's with precomputed scores.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.preference import drawn
from benchmarks.preference.sides import LOSSES, SIDES

HERE = Path(__file__).parent
INSTALLED = Path.home() / ".cache/polyreme/preference-peers"
WARM_STEPS = 2
BAR = {
    "dpo_over_sft_cpu_ratio": 1.05,
    "shared_prompt_ratio": 1.15,
    "over_trl_ratio": 1.5,
    "loss_difference": 1e-4,
    "gradient_difference": 1e-4,
}
AT_LEAST = ("over_trl_ratio",)


def main() -> int:
    """Compare; 0 when every bar is met."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=2, help="steps of each in a round")
    parser.add_argument("--pairs", type=int, default=4, help="of a step")
    parser.add_argument("--prompt", type=int, default=384, help="tokens")
    parser.add_argument("--answer", type=int, default=96, help="tokens of a chosen answer; rejected ones are shorter")
    parser.add_argument("--installed", type=Path, default=INSTALLED, help="folder of TRL; made if there is none")
    options = parser.parse_args()
    install(options.installed)
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        sides = {name: stack.enter_context(started(name, Path(folder), options)) for name in SIDES}
        figures = differences(Path(folder))
        for side in sides.values():
            side(WARM_STEPS)
        rounds = [{name: side(options.steps) for name, side in sides.items()} for _ in range(options.rounds)]
    figures |= ratios(rounds, options)
    ok = all(figures[name] >= bar if name in AT_LEAST else figures[name] <= bar for name, bar in BAR.items())
    sys.stdout.write(json.dumps({"name": "bench-preference", "figures": figures, "bar": BAR, "ok": ok}) + "\n")
    return 0 if ok else 1


def ratios(rounds: list[dict[str, dict[str, float]]], options: argparse.Namespace) -> dict[str, float]:
    """Return the medians over rounds."""

    def median(one: str, other: str, time: str) -> float:
        return statistics.median(taken[one][time] / taken[other][time] for taken in rounds)

    both = options.answer + options.answer - options.answer // 8
    tokens = (options.prompt + both) / (2 * options.prompt + both)
    return {
        "dpo_over_sft_cpu_ratio": round(median("shared", "text", "cpu_s"), 3),
        "shared_prompt_ratio": round(median("shared", "apart", "cpu_s") / tokens, 3),
        "over_trl_ratio": round(median("trl", "shared", "step_s"), 3),
        "apart_over_trl_ratio": round(median("trl", "apart", "step_s"), 3),
        "tokens_of_shared_over_apart": round(tokens, 3),
        "pairs_per_s": round(options.pairs / statistics.median(taken["shared"]["step_s"] for taken in rounds), 2),
    }


def differences(folder: Path) -> dict[str, float]:
    """Compare losses, and each gradient relative to the largest of its tensor, over all losses."""
    losses, gradients = [], []
    for loss in (*LOSSES, *drawn.LOSSES):
        ours, theirs = (torch.load(folder / f"{side}-{loss}.pt") for side in ("ours", "trl"))
        losses.append(abs(ours["loss"] - theirs["loss"]))
        for name, gradient in theirs["gradients"].items():
            own = ours["gradients"][name]
            gradients.append(float((own - gradient).abs().max() / gradient.abs().max().clamp(min=1e-30)))
    return {"loss_difference": max(losses), "gradient_difference": max(gradients)}


def install(folder: Path) -> None:
    """Put the peer into a folder of its own."""
    if not (folder / "trl").is_dir():
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(folder)]
        subprocess.run([*command, "-r", str(HERE / "peers.txt")], check=True)


@contextlib.contextmanager
def started(name: str, folder: Path, options: argparse.Namespace) -> Iterator[Any]:
    """Start a side; yield what asks it for steps and returns their times."""
    sizes = [f"--{size}={getattr(options, size)}" for size in ("pairs", "prompt", "answer")]
    environment = os.environ | ({"PYTHONPATH": str(options.installed)} if name == "trl" else {})
    with subprocess.Popen(
        [sys.executable, str(HERE / "sides.py"), name, str(folder), *sizes],
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        ask, said = process.stdin, process.stdout

        def read() -> dict[str, float]:
            while line := said.readline():
                with contextlib.suppress(ValueError):  # the peer prints lines of its own
                    return dict(json.loads(line))
            raise SystemExit(f"side {name} ended before it answered; its error is above")

        def side(steps: int) -> dict[str, float]:
            ask.write(f"{steps}\n")
            ask.flush()
            return read()

        try:
            read()
            yield side
        finally:
            process.kill()


if __name__ == "__main__":
    raise SystemExit(main())
