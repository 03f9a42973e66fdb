"""The planner's memory against what the trainer holds in a step on a fake process group of eight ranks."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import FLOAT32, HARDWARE, MIXED
from polyreme_planner.layout import Layout
from polyreme_planner.memory import kept_numbers, memory_of
from polyreme_planner.model_parts import Part
from polyreme_planner.schedules import Schedule
from tests.unit.trainer.parallel.fake_rank import (
    ADAPTED,
    ADAPTERS,
    HELD,
    KINDS,
    LAYOUTS,
    SIDE,
    TOKENS,
    WIDE,
    WORLD,
    shape_of,
)
from tests.unit.trainer.parallel.fake_start import STARTS, planned_bytes, shallow

ROOT = Path(__file__).parents[4]
SHAPES = ("2-1-2", "3-1-2", "3-2-2", "2-1-3")
"""Layers, dense ones of them, layers of the tower: neighbours differ by one layer of one kind."""

STATE_ERROR_OF_TP = 0.05
"""Share by which the planned state may be off where tensor ranks do not share what every one of them holds whole."""

Held = dict[str, dict[str, int]]


@pytest.fixture(scope="module")
def held() -> Held:
    names = [f"{shape}-{recompute}" for shape in SHAPES for recompute in Recompute]
    command = [sys.executable, "-m", "tests.unit.trainer.parallel.fake_rank", *names]
    paths = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=paths)
    assert ended.returncode == 0, ended.stderr
    found: Held = json.loads(ended.stdout)
    return found


def setting(name: str) -> Setting:
    media = (SIDE // 2) ** 2
    mix = Mix(sequence_tokens=TOKENS, image_patches=SIDE * SIDE, visual_share=media / TOKENS)
    return Setting(shape=shape_of(*map(int, name.split("-"))), mix=mix, hardware=HARDWARE["cpu"], numerics=FLOAT32)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize(
    ("part", "with_it", "without", "rows"),
    [
        (Part.MOE, "3-1-2", "2-1-2", TOKENS),
        (Part.DENSE, "3-2-2", "2-1-2", TOKENS),
    ],
)
def test_a_layer_keeps_what_is_planned(
    held: Held, part: Part, with_it: str, without: str, rows: int, recompute: Recompute
) -> None:
    kept = (activations(held, with_it, recompute) - activations(held, without, recompute)) / 4 / rows
    assert kept == pytest.approx(kept_numbers(shape_of(2, 1, 2), recompute=recompute)[part], rel=0.02)


@pytest.mark.slow
@pytest.mark.parametrize("recompute", Recompute)
def test_a_layer_of_the_tower_keeps_what_is_planned(held: Held, recompute: Recompute) -> None:
    kept = (activations(held, "2-1-3", recompute) - activations(held, "2-1-2", recompute)) / 4 / (SIDE * SIDE)
    shape = shape_of(2, 1, 2)
    planned = kept_numbers(shape, recompute=recompute)[Part.TOWER] / shape.vision.layers
    assert kept == pytest.approx(planned, rel=0.02)


def activations(held: Held, shape: str, recompute: Recompute) -> int:
    return held[f"{shape}-{recompute}"]["activations"]


@pytest.mark.slow
@pytest.mark.parametrize("shape", SHAPES)
def test_the_whole_rank_holds_what_is_planned(held: Held, shape: str) -> None:
    of, name = setting(shape), f"{shape}-{Recompute.NONE}"
    memory = memory_of(
        of,
        Layout(dp=WORLD),
        packs=1,
        microbatches=1,
        recompute=Recompute.NONE,
        schedule=None,
        split=(of.shape.decoder.layers,),
    )
    assert memory.weights_bytes == held[name]["weights"]
    assert memory.gradients_bytes == held[name]["gradients"]
    assert memory.optimizer_bytes == held[name]["optimizer"]
    assert memory.activations_bytes == pytest.approx(held[name]["activations"], rel=0.15)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "split"), LAYOUTS, ids=lambda value: str(value) if isinstance(value, Layout) else ""
)
def test_a_layout_divides_the_state_as_planned(held: Held, layout: Layout, split: tuple[int, ...]) -> None:
    memory = memory_of(
        setting("-".join(map(str, WIDE))),
        layout,
        packs=1,
        microbatches=layout.pp,
        recompute=Recompute.NONE,
        schedule=Schedule.ONE_F_ONE_B if layout.pp > 1 else None,
        split=split,
    )
    seen = held[str(layout)]["weights"]
    error = {1: 0.0, 2: STATE_ERROR_OF_TP}[layout.tp]
    assert abs(memory.weights_bytes - seen) <= error * seen
    assert memory.gradients_bytes == memory.weights_bytes
    assert memory.optimizer_bytes == 2 * memory.weights_bytes


NUMERICS = {
    "whole": dataclasses.replace(MIXED, sharded_optimizer=False),
    "zero1": MIXED,
    "muon": dataclasses.replace(MIXED, sharded_optimizer=False, matrix_optimizer_bytes=8),
    "rows": dataclasses.replace(MIXED, sharded_parameters=True),
    "adapters": dataclasses.replace(MIXED, sharded_optimizer=False),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_state_is_held_as_planned(held: Held, kind: str) -> None:
    """In bfloat16, with float32 routers."""
    adapters = ADAPTERS if kind == "adapters" else None
    of = dataclasses.replace(setting("-".join(map(str, WIDE))), numerics=NUMERICS[kind], adapters=adapters)
    planned = memory_of(
        of, HELD, packs=1, microbatches=1, recompute=Recompute.NONE, schedule=None, split=(of.shape.decoder.layers,)
    )
    assert (planned.gathered_bytes > 0) == (kind == "rows")
    assert planned.weights_bytes == pytest.approx(held[kind]["weights"], rel=0.02)
    assert planned.gradients_bytes == pytest.approx(held[kind]["gradients"], rel=0.02)
    assert planned.optimizer_bytes == pytest.approx(held[kind]["optimizer"], rel=0.02)
    # At most one tensor more, the one that is drawn: here it lies in the same memory.
    drawn = 4 * of.shape.decoder.vocabulary * of.shape.decoder.width
    assert held[kind]["peak"] <= 1.05 * planned.start_bytes + 2 * drawn


@pytest.mark.slow
@pytest.mark.parametrize("kind", ADAPTED)
def test_adapters_keep_what_is_planned(held: Held, kind: str) -> None:
    of = dataclasses.replace(setting("3-1-2"), adapters=ADAPTED[kind])
    planned = memory_of(
        of, Layout(dp=WORLD), packs=1, microbatches=1, recompute=Recompute.NONE, schedule=None, split=(3,)
    )
    assert planned.activations_bytes == pytest.approx(held[kind]["activations"], rel=0.05)


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_one_of_1024_ranks_starts_in_the_memory_that_is_planned(held: Held, name: str) -> None:
    shape, layout = STARTS[name]
    planned = planned_bytes(shallow(shape, layout), layout)
    assert held[f"start {name}"]["counted"] == pytest.approx(planned, rel=0.05)
