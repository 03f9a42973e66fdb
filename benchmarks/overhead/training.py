"""A rank of the benchmark: the trainer's own loop on drawn tokens, with run health on and off."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from polyreme_api.batch import IGNORED_TARGET, PackedBatch, PreferenceSet, TokenIds
from polyreme_datahub.objects import open_store
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO, NO_VISION
from polyreme_system.clock import SystemClock
from polyreme_system.rank_page import PageWriter
from polyreme_trainer import rank_page
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train import loop
from polyreme_trainer.train.loss_health import LossHistory
from polyreme_trainer.train.run import train_rank
from polyreme_trainer.train.settings import CheckpointSettings, TrainSettings

PACK_TOKENS, DOCUMENTS = 1024, 8
NEVER = 1_000_000
VALUES = 3 * 14 * 14


class Drawn:
    """Packs of drawn tokens without images: a pure function of step and pack."""

    token_ids = TokenIds(media=5, end=1, pad=0)
    preference_sets: Sequence[PreferenceSet | None] = (None,)

    def __init__(self, ranks: int) -> None:
        self._ranks = ranks

    def packs_in(self, _: int) -> int:
        """One of each rank."""
        return self._ranks

    def pack_tokens_in(self, _: int) -> int:
        """Of all packs the same."""
        return PACK_TOKENS

    def packs(self, step: int, *, first: int, count: int) -> PackedBatch:
        """Draw packs."""
        size = count * PACK_TOKENS
        tokens_T = np.random.default_rng([step, first]).integers(10, 200, size=size)
        length = PACK_TOKENS // DOCUMENTS
        targets_T = np.roll(tokens_T, -1)
        targets_T[length - 1 :: length] = IGNORED_TARGET
        return PackedBatch(
            tokens_T=tokens_T,
            targets_T=targets_T,
            positions_T=np.arange(size) % length,
            document_offsets=np.arange(0, size + 1, length, dtype=np.int32),
            patches_PC=np.zeros((0, VALUES), np.float32),
            grids_I2=np.zeros((0, 2), np.int32),
            sample_ids=[str(number) for number in range(count * DOCUMENTS)],
            unmasked_tokens=int((targets_T != IGNORED_TARGET).sum()),
        )

    def grids(self, _: int, *, first: int, count: int) -> list[Any]:  # noqa: ARG002 - as a source
        """No images."""
        return [np.zeros((0, 2), np.int32) for _ in range(count)]

    def patches(self, _: int, *, pack: int, images: Sequence[int]) -> Any:  # noqa: ARG002 - as a source
        """No images."""
        return np.zeros((0, VALUES), np.float32)

    def pairs(self, _: int, *, first: int, count: int) -> Any:  # noqa: ARG002 - as a source
        """No pairs."""
        return np.zeros((0, 2), np.int64)

    def state(self, step: int) -> Mapping[str, Any]:
        """The step alone."""
        return {"step": step}

    def refresh(self) -> None:
        """Nothing is appended."""

    def check_state(self, _: Mapping[str, Any]) -> None:
        """Nothing is resumed."""


class Silent:
    """Takes progress, and drops it."""

    def report(self, _: object) -> None:
        """Drop it."""


HEALTH: tuple[tuple[Any, str, Callable[..., object]], ...] = (
    (PageWriter, "is_ours", lambda _: False),
    (loop, "work_of", lambda *_: 0),
    (LossHistory, "judge", lambda *_: None),
)
"""What run health calls in a step, and what takes its place while it is off: no page, no work, no judgement."""


def train(
    *,
    rank: int,
    world: int,
    port: int,
    folder: Path,
    page: str,
    gate: Callable[[Callable[[bool], None]], Callable[[int, Any], bool]],
) -> None:
    """Train until this process is killed.

    Args:
        rank: Of this process.
        world: Ranks of the gang.
        port: Where they meet.
        folder: For checkpoints; none is written.
        page: The rank's page.
        gate: Gets what turns run health on or off; returns what is called in each step.
    """
    rank_page.attach(os.open(page, os.O_RDWR))
    on = [getattr(owner, name) for owner, name, _ in HEALTH]

    def switch(health: bool) -> None:
        for (owner, name, off), natural in zip(HEALTH, on, strict=True):
            setattr(owner, name, natural if health else off)

    settings = TrainSettings(
        rank=RankSettings(rank=rank, world=world, attempt=1, master_port=port),
        layout=Layout(dp=world),
        shape=dataclasses.replace(KIMI_VL_NANO, vision=NO_VISION),
        steps=NEVER,
        checkpoint=CheckpointSettings(store=open_store(folder.as_uri()), folder=folder, interval_steps=NEVER),
    )
    source = Drawn(world)
    train_rank(settings, source=source, evaluation=None, sink=Silent(), clock=SystemClock(), amend=gate(switch))
