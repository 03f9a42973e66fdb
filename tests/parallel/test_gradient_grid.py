"""Gradients and losses do not depend on the layout; a reduction that is wrong is seen."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

TOLERANCE = 1e-5
LAYOUTS = [(4, 1), (4, 2), (4, 4), (2, 2)]


def run(start: Any, root: Path, layout: tuple[int, int], **request: Any) -> Mapping[str, Any]:
    output = root / "output.pt"
    gang = start("gradient", layout=layout, root=root, output=str(output), **request)
    assert set(gang.wait()) == {0}, gang.logs()
    result: Mapping[str, Any] = torch.load(output)
    return result


def largest_difference(seen: Mapping[str, Any], expected: Mapping[str, Any]) -> float:
    """Over all tensors, the largest difference relative to the largest gradient of that tensor."""
    assert seen["gradients"].keys() == expected["gradients"].keys()
    return max(
        float((seen["gradients"][name] - value).abs().max() / value.abs().max())
        for name, value in expected["gradients"].items()
    )


def test_every_layout_has_the_gradient_and_the_losses_of_one_process(start: Any, tmp_path: Path) -> None:
    alone = run(start, tmp_path / "alone", (1, 1))
    for layout in LAYOUTS:
        seen = run(start, tmp_path / f"{layout}", layout)
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout
    for layout in [(4, 1), (4, 2)]:
        seen = run(start, tmp_path / f"{layout} by two sums", layout, fused_bytes_max=0)
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout
    assert alone["losses"][-1] < alone["losses"][0]


@pytest.mark.parametrize(
    ("bug", "fused_bytes_max"),
    [
        ("experts are not summed over their copies", 0),
        ("experts are divided by their copies", 0),
        ("an expert's gradient lies in the wrong slice", 1 << 30),
        ("each rank divides by its own count", 1 << 30),
    ],
)
def test_a_planted_bug_in_the_reduction_is_caught(start: Any, tmp_path: Path, bug: str, fused_bytes_max: int) -> None:
    alone = run(start, tmp_path / "alone", (1, 1), steps=1)
    broken = run(start, tmp_path / "broken", (4, 2), steps=1, bug=bug, fused_bytes_max=fused_bytes_max)
    assert largest_difference(broken, alone) > 100 * TOLERANCE
