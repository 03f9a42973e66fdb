"""Step time of gloo ranks when one has all images: encoded there, or balanced over all; and the cost of balancing.

Usage: run.py [--rounds 12]
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import multiprocessing
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyreme_api.batch import PackedBatch, TokenIds
from polyreme_datahub.objects import open_store
from polyreme_planner.flops import Mix, forward_flops, image_flops
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, all_parts
from polyreme_planner.shapes import KIMI_VL_A3B, ModelShape, model_shape
from polyreme_trainer.parallel.collectives import gather_to_first, largest_number
from polyreme_trainer.parallel.image_balancing import balance_images
from polyreme_trainer.parallel.world import RankSettings, open_world
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.microbatches import read_microbatches
from polyreme_trainer.train.settings import CheckpointSettings, ImagesOver, TrainSettings
from polyreme_trainer.train.state import backward, open_state, reduce, update

RANKS = (2, 4)
PACKS, TOKENS, IMAGE_PATCHES = 2, 512, 256
"""Of each data-parallel rank; the first one's packs are images for ``SEEN`` of their tokens, the others' are text."""
SEEN = 0.9
DECODER_LAYERS = 9
"""So many that the tower costs about as much of the decoder as in kimi-vl-a3b, for a token."""
GAIN_SHARE_MIN = 0.5
"""Least part of what operations promise; the rest is what no operation counts."""
DEALT_IMAGES = 64
"""Images of each data-parallel rank where balancing is timed."""
RUN_S_MAX = 240.0
LEARNING_RATE = 1e-4


def main() -> int:
    """Run; 0 when the bar is met."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=12)
    options = parser.parse_args()
    promised = {ranks: promise(ranks) for ranks in RANKS}
    figures: dict[str, float] = {"tower_share": round(tower_share(shape()), 2)}
    figures["tower_share_kimi"] = round(tower_share(KIMI_VL_A3B), 2)
    for ranks in RANKS:
        home, dealt = measured(ranks, options.rounds)
        figures |= {
            f"home_busy_s_{ranks}": round(home["busy_s"], 4),
            f"dealt_busy_s_{ranks}": round(dealt["busy_s"], 4),
            f"busy_ratio_{ranks}": round(dealt["busy_s"] / home["busy_s"], 3),
            f"operations_ratio_{ranks}": round(promised[ranks], 3),
            f"step_ratio_{ranks}": round(dealt["step_s"] / home["step_s"], 3),
        }
    figures |= {f"deal_s_{ranks}": round(balancing_s(ranks), 4) for ranks in (2, 8, 64, 256)}
    shares = {
        f"gain_share_{ranks}": round((1 - figures[f"busy_ratio_{ranks}"]) / (1 - promised[ranks]), 2) for ranks in RANKS
    }
    figures |= shares
    ok = min(shares.values()) >= GAIN_SHARE_MIN
    bar = dict.fromkeys(shares, GAIN_SHARE_MIN)
    print(json.dumps({"name": "bench-images", "figures": figures, "bar": bar, "ok": ok}))
    return 0 if ok else 1


def shape() -> ModelShape:
    """Return the model that is trained."""
    return model_shape("kimi-vl-nano", {"decoder": {"layers": DECODER_LAYERS}})


def mix(seen: float) -> Mix:
    """Say what a pack holds."""
    return Mix(sequence_tokens=TOKENS, image_patches=IMAGE_PATCHES, visual_share=seen)


def tower_share(of: ModelShape) -> float:
    """Operations of tower and projector for an image token, in those of all else for a token."""
    flops = forward_flops(of, dataclasses.replace(mix(1.0), image_patches=IMAGE_PATCHES))
    return flops[Part.TOWER] / sum(flops[part] for part in all_parts(of) if part is not Part.TOWER)


def promise(ranks: int) -> float:
    """Work out the slowest rank's operations with balancing over those without."""
    of = shape()
    flops = forward_flops(of, mix(0.0))
    other_flops = int(PACKS * TOKENS * sum(flops[part] for part in all_parts(of) if part is not Part.TOWER))
    grids = [np.asarray(packs_of(rank).grids_I2).tolist() for rank in range(ranks)]
    costs = [[image_flops(of, rows * columns) for rows, columns in own] for own in grids]
    assignment = balance_images(costs, parts=1, other_flops=other_flops)
    assert assignment is not None
    return (other_flops + max(assignment.loads(costs))) / (other_flops + sum(costs[0]))


def balancing_s(ranks: int) -> float:
    """Time balancing images of many sizes, where one rank in eight has three times as many [seconds of processor]."""
    draw = np.random.default_rng(0)
    counts = [DEALT_IMAGES * (3 if rank % 8 == 0 else 1) for rank in range(ranks)]
    patches = [(4 * draw.integers(16, 1024, count)).tolist() for count in counts]
    costs = [[image_flops(KIMI_VL_A3B, of) for of in own] for own in patches]
    begin_s = time.process_time()
    assert balance_images(costs, parts=1, other_flops=0) is not None
    return time.process_time() - begin_s


@functools.cache
def packs_of(rank: int) -> PackedBatch:
    """Make up the packs of a data-parallel rank."""
    return synthetic_packs(shape(), mix(0.0 if rank else SEEN), packs=PACKS, seed=rank)


class Source:
    """The same packs in every step (``BatchSource``)."""

    token_ids = TokenIds(media=MEDIA_TOKEN, end=1, pad=2)
    preference_sets = (None,)

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def packs_in(self, _: int) -> int:
        """Packs of all ranks."""
        return PACKS * self._ranks

    def pack_tokens_in(self, _: int) -> int:
        """Tokens of one."""
        return TOKENS

    def packs(self, _: int, *, first: int, count: int) -> PackedBatch:
        """Return all packs of one rank."""
        assert count == PACKS
        return packs_of(first // PACKS)

    def refresh(self) -> None:
        """Nothing changes."""

    def grids(self, _: int, *, first: int, count: int) -> Sequence[Any]:
        """Return the grids of some packs: each has a part of its rank's."""
        ranks = range(self._ranks)
        packs = [part for rank in ranks for part in np.split(np.asarray(packs_of(rank).grids_I2), PACKS)]
        return packs[first : first + count]

    def pairs(self, _: int, *, first: int, count: int) -> Any:  # noqa: ARG002
        """There are none."""
        return np.zeros((0, 2), np.int64)

    def patches(self, _: int, *, pack: int, images: Sequence[int]) -> Any:
        """Return the patches of some images of a pack."""
        batch = packs_of(pack // PACKS)
        count = len(np.asarray(batch.grids_I2)) // PACKS
        by_image = np.split(np.asarray(batch.patches_PC), count * PACKS)
        return np.concatenate([by_image[pack % PACKS * count + image] for image in images])

    def state(self, _: int) -> Mapping[str, Any]:
        """Nothing is resumed."""
        return {}

    def check_state(self, _: Mapping[str, Any]) -> None:
        """Nothing is resumed."""


def measured(ranks: int, rounds: int) -> tuple[dict[str, float], dict[str, float]]:
    """Run a gang; return the medians of a step with images at their owners, and balanced."""
    with tempfile.TemporaryDirectory(prefix="bench-images-") as folder, socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(128)
        path, fork = Path(folder) / "answer.json", multiprocessing.get_context("fork")
        gang = [fork.Process(target=be_rank, args=(rank, ranks, rounds, listener, path)) for rank in range(ranks)]
        for process in gang:
            process.start()
        end_s = time.monotonic() + RUN_S_MAX
        for process in gang:
            process.join(max(0.0, end_s - time.monotonic()))
        for process in gang:
            if process.is_alive():
                process.kill()
                process.join()
        home, dealt = json.loads(path.read_text())
        return home, dealt


def be_rank(rank: int, ranks: int, rounds: int, listener: socket.socket, path: Path) -> None:
    """Train both ways in turn; the first rank tells."""
    import torch

    torch.set_num_threads(1)
    settings = TrainSettings(
        rank=RankSettings(
            rank=rank,
            world=ranks,
            attempt=1,
            master_port=listener.getsockname()[1],
            master_fd=listener.detach() if rank == 0 else None,
        ),
        layout=Layout(dp=ranks),
        shape=shape(),
        images_over=ImagesOver.DATA,
        steps=1,
        checkpoint=CheckpointSettings(store=open_store(path.parent.as_uri())),
    )
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
        image_balancer = state.image_balancer
        steps: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
        for number in range(2 * (rounds + 1)):
            state.image_balancer = image_balancer if number % 2 else None
            largest_number(0, world.meshes.world_group)
            begin_s, begin_busy_s = time.perf_counter(), time.process_time()
            microbatches = read_microbatches(state, Source(ranks), settings, world.meshes, number + 1)
            total = reduce(state, backward(state, *microbatches), world.meshes)
            update(state, total, settings.optimizer, rate=LEARNING_RATE)
            busy_s = time.process_time() - begin_busy_s  # before it waits for the others
            largest_number(0, world.meshes.world_group)
            steps[bool(number % 2)].append((time.perf_counter() - begin_s, busy_s))
        medians = gather_to_first([medians_of(steps[way][1:]) for way in (False, True)], world.meshes.world_group)
        if medians is not None:
            slowest = [max(of, key=lambda rank: rank["busy_s"]) for of in zip(*medians, strict=True)]
            path.write_text(json.dumps(slowest))


def medians_of(steps: list[tuple[float, float]]) -> dict[str, float]:
    """Take the medians of a rank's steps."""
    step_s, busy_s = (statistics.median(column) for column in zip(*steps, strict=True))
    return {"step_s": step_s, "busy_s": busy_s}


if __name__ == "__main__":
    sys.exit(main())
