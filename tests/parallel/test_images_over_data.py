"""If other data-parallel ranks encode a rank's images, the gradient is that of one process."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.gangs import Gang, gradients, largest_difference, start_gang
from tests.parallel.grid import TOLERANCE, UNEVEN, Degrees, name
from tests.parallel.pipes import LAYERS, TWO, Pipe

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

STANDING = {"stages": [{"name": "words", "steps": 2, "learners": ["Decoder"]}]}
"""A stage in which neither tower nor projector learns."""
ZERO1 = {"optimizer": {"zero1": True, "bucket_scalars": 40_000}}


@pytest.fixture(scope="module")
def alone(_warm: Any, tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """One process with the same packs."""

    def start(body: str, *, layout: Any, root: Path, **request: Any) -> Gang:
        return start_gang(_warm, body, layout=layout, root=root, **request)

    return gradients(start, tmp_path_factory.mktemp("alone"), (1, 1), steps=2, **UNEVEN)


@pytest.mark.parametrize(
    ("layout", "more"),
    [
        ({"dp": 4, "ep": 2}, ZERO1),
        ({"dp": 2}, {"parameter_sharding": "FSDP2"}),
        ({"dp": 2, "cp": 2}, {"pipeline": {"microbatches": 2}}),
        ({"dp": 2, "tp": 2, "ep": 2}, {"recompute": "selective"}),
        ({"dp": 4, "ep": 4}, {"neighbours_max": 2}),
    ],
    ids=lambda given: name(given) if isinstance(given, dict) and "dp" in given else None,
)
def test_a_rank_with_all_images_and_ranks_with_none_have_the_gradient_of_one_process(
    start: Any, tmp_path: Path, alone: Any, layout: Degrees, more: dict[str, Any]
) -> None:
    """Some samples are damaged: their images have no tokens, and who encodes them does not know."""
    seen = gradients(start, tmp_path, layout, steps=2, **UNEVEN, **more)
    assert max(seen["moved"]) > 0
    assert largest_difference(seen, alone) <= TOLERANCE
    assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)


def test_a_frozen_tower_encodes_images_of_other_ranks(start: Any, tmp_path: Path) -> None:
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=1, **UNEVEN, **STANDING)
    seen = gradients(start, tmp_path / "shared", {"dp": 2}, steps=1, **UNEVEN, **STANDING)
    assert max(seen["moved"]) > 0
    assert not any(value.any() for key, value in seen["gradients"].items() if "vision_tower" in key)
    assert largest_difference(seen, alone) <= TOLERANCE


def test_the_first_stage_of_a_pipeline_encodes_for_others(start: Any, tmp_path: Path) -> None:
    """Its backward passes come apart, microbatches differ in images, and some have no exchange."""
    pipe = Pipe({"pp": 2, "dp": 2}, "ZBVZeroBubble", TWO["ZBVZeroBubble"])
    whole = {"steps": 1, "decoder": {"layers": LAYERS}, **UNEVEN, "seeing": 3, "packs": pipe.packs}
    alone = gradients(start, tmp_path / "alone", (1, 1), **whole)
    seen = gradients(start, tmp_path / "shared", pipe.degrees, **(pipe.request | whole))
    assert max(seen["moved"]) > 0 == min(seen["moved"])
    assert largest_difference(seen, alone) <= TOLERANCE


def test_images_stay_with_their_context_where_a_job_says_so(start: Any, tmp_path: Path) -> None:
    seen = gradients(start, tmp_path, {"dp": 2}, steps=1, images_over="Context", **UNEVEN)
    assert seen["moved"] == [0]


@pytest.mark.parametrize(
    "bug",
    [
        "features come home to other tokens",
        "features come home without their gradients",
        "gradients of remote images count twice",
        "grids of remote images are not in the order of their patches",
    ],
)
def test_a_planted_bug_in_a_deal_is_caught(start: Any, tmp_path: Path, alone: Any, bug: str) -> None:
    broken = gradients(start, tmp_path, {"dp": 2}, steps=1, bug=bug, **UNEVEN)
    assert largest_difference(broken, alone) > 100 * TOLERANCE


def test_a_rank_that_skips_an_exchange_ends_the_gang(start: Any, tmp_path: Path) -> None:
    request = {"steps": 1, "collective_timeout_s": 3.0, "bug": "a rank skips the exchange", **UNEVEN}
    gang = start("gradient", layout={"dp": 2}, root=tmp_path, output=str(tmp_path / "never"), **request)
    assert 0 not in gang.wait()
