"""Gradients and losses do not depend on the layout; a wrong step is detected."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import ALWAYS, CAPACITY, CAPACITY_ALWAYS, TOLERANCE, Degrees, name, turn, ways

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def test_every_layout_has_the_gradient_and_the_losses_of_one_process(start: Any, tmp_path: Path) -> None:
    alone = gradients(start, tmp_path / "alone", (1, 1))
    for layout in [(4, 1), (4, 4), (2, 2)]:
        seen = gradients(start, tmp_path / f"{layout}", layout)
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout
    for layout in [(4, 1), (4, 2)]:
        seen = gradients(start, tmp_path / f"{layout} by two sums", layout, fused_bytes_max=0)
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout
    assert alone["losses"][-1] < alone["losses"][0]


def test_streams_that_are_cut_and_layers_that_are_shared_have_the_gradient_of_one_process(
    start: Any, tmp_path: Path, turn_number: int
) -> None:
    """Documents lie across the cuts, ranks have no image, an expert has no token."""
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=2, long=True)
    for number, layout in enumerate([*ALWAYS, turn(turn_number)]):
        seen = gradients(start, tmp_path / name(layout), layout, steps=2, long=True, **ways(number))
        rows = "parameter_sharding" in ways(number)
        assert seen["gathered"] == rows, "one layer at a time"
        # torch's checkpoint of a layer imports it as well.
        assert seen["compiler"] == (rows or ways(number)["recompute"] == "full"), "no job pays for what it does not ask"
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout


@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        ({"dp": 3}, {"microbatches": 2}),  # the last rank's second microbatch is a null pack
        ({"dp": 2, "cp": 2, "ep": 4}, None),
        ({"dp": 2, "tp": 2, "ep": 2}, None),
        ({"dp": 2, "pp": 2}, {"schedule": "1F1B", "layers": [1, 2], "microbatches": 3}),
    ],
    ids=str,
)
def test_null_packs_of_ranks_that_do_not_divide_a_step_change_nothing(
    start: Any, tmp_path: Path, layout: Degrees, pipeline: dict[str, Any] | None
) -> None:
    """Neither the gradient nor the losses, nor the biases of the router, which follow from its load."""
    same: dict[str, Any] = {"packs": 5, "steps": 2}
    alone = gradients(start, tmp_path / "alone", (1, 1), **same)
    seen = gradients(start, tmp_path / name(layout), layout, **same, images_over="Data", pipeline=pipeline)
    assert largest_difference(seen, alone) <= TOLERANCE
    assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)
    assert seen["biases"] == alone["biases"]


def test_groups_of_experts_and_stretched_positions_have_the_gradient_of_one_process(start: Any, tmp_path: Path) -> None:
    decoder: dict[str, Any] = {"expert_groups": 4, "groups_per_token": 2, "experts_per_token": 3, "q_rank": 24}
    decoder |= {"yarn_factor": 40.0, "yarn_positions": 16, "yarn_mscale": 0.7, "yarn_mscale_all_dim": 1.0}
    same: dict[str, Any] = {"steps": 2, "long": True, "decoder": decoder}
    alone = gradients(start, tmp_path / "alone", (1, 1), **same)
    plain = gradients(start, tmp_path / "plain", (1, 1), **same | {"decoder": {"q_rank": 24, "experts_per_token": 3}})
    assert largest_difference(plain, alone) > 100 * TOLERANCE
    layout = {"cp": 2, "tp": 2, "ep": 4}
    seen = gradients(start, tmp_path / name(layout), layout, **same)
    assert largest_difference(seen, alone) <= TOLERANCE
    assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)


def test_layouts_that_drop_rows_have_the_gradient_of_one_process_that_drops_the_same(
    start: Any, tmp_path: Path
) -> None:
    """Dropped rows have no gradient; buffers are padded; drops are counted over all ranks, by layer and expert."""
    whole: dict[str, Any] = {"steps": 1, "long": True}
    alone: Any = None
    for number, layout in enumerate(CAPACITY_ALWAYS):
        same = {"layout": layout, "capacity": CAPACITY}
        alone = gradients(start, tmp_path / f"as in {name(layout)}", (1, 1), **whole, as_in=same)
        seen = gradients(start, tmp_path / name(layout), layout, **whole, capacity=CAPACITY, **ways(number + 1))
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout
        assert seen["dropped"] == alone["dropped"], layout
        assert all(sum(layer) > 0 for layer in seen["dropped"]), layout
    for bug in ("a dropped row still has a gradient", "an answer goes to the rank behind the one that asked"):
        broken = gradients(start, tmp_path / bug, CAPACITY_ALWAYS[-1], **whole, capacity=CAPACITY, bug=bug)
        assert largest_difference(broken, alone) > 100 * TOLERANCE, bug


@pytest.mark.parametrize(
    ("bug", "layout", "fused_bytes_max"),
    [
        ("experts are not summed over their copies", {"dp": 4, "ep": 2}, 0),
        ("experts are divided by their copies", {"dp": 4, "ep": 2}, 0),
        ("an expert's gradient lies in the wrong slice", {"dp": 4, "ep": 2}, 1 << 30),
        ("each rank divides by its own count", {"dp": 4, "ep": 2}, 1 << 30),
        ("each rank divides by its own count", {"cp": 2}, 1 << 30),
        ("whole parameters are not summed over context ranks", {"cp": 2}, 1 << 30),
        ("a stream is cut without head and tail", {"cp": 2}, 1 << 30),
        ("gradients of keys stay where they were made", {"cp": 4}, 1 << 30),
        ("features come in the order of their ranks", {"cp": 2}, 1 << 30),
        ("a norm's gradient is not summed over tensor ranks", {"tp": 2}, 0),
        ("slices are summed over tensor ranks", {"tp": 2}, 0),
        ("what tensor ranks made is scattered without a sum", {"tp": 2}, 1 << 30),
    ],
)
def test_a_planted_bug_in_a_step_is_caught(
    start: Any, tmp_path: Path, bug: str, layout: Degrees, fused_bytes_max: int
) -> None:
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=1)
    broken = gradients(start, tmp_path / "broken", layout, steps=1, bug=bug, fused_bytes_max=fused_bytes_max)
    assert largest_difference(broken, alone) > 100 * TOLERANCE
