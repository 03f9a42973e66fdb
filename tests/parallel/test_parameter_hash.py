"""Copies of parameters are compared: a bit that changes in one ends the attempt, and names the rank."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.exit_codes import ExitCode
from tests.parallel.attempts import begin, history
from tests.roots import list_checkpoints

FLIPPED = 2
GIVEN: dict[str, Any] = {"interval": 4, "hashed_every": 3}
pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def _flips(part: str, step: int) -> dict[str, Any]:
    return {"rank": FLIPPED, "how": {"step": step, "part": part}}


def test_a_bit_that_flips_names_its_rank_and_the_run_resumes_from_equal_copies(start: Any, tmp_path: Path) -> None:
    whole, flipped = tmp_path / "whole", tmp_path / "flipped"
    assert begin(start, whole, 1, **GIVEN).wait() == [0] * 4
    gang = begin(start, flipped, 1, flips=_flips("dense", 6), **GIVEN)
    assert gang.wait() == [ExitCode.ENVIRONMENT] * FLIPPED + [ExitCode.COPIES_DIFFER, ExitCode.ENVIRONMENT]
    assert f"copies of parameters differ after step 6: those of rank {FLIPPED} from" in gang.logs()
    assert [found.step for found in list_checkpoints(flipped)[0]] == [GIVEN["interval"]]
    gang = begin(start, flipped, 2, **GIVEN)
    assert gang.wait() == [0] * 4, gang.logs()
    assert history(flipped) == history(whole)


@pytest.mark.parametrize(
    ("way", "part", "odd"),
    [
        ({}, "experts", [0, FLIPPED]),
        ({"optimizer": {"zero1": True}}, "dense", [FLIPPED]),
        ({"parameter_sharding": "FSDP2"}, "dense", [FLIPPED]),
        ({"parameter_sharding": "FSDP2"}, "sharded", []),
    ],
    ids=["of two copies neither is right", "zero1", "fsdp2: whole parameters", "fsdp2: rows have no copies"],
)
def test_what_is_compared_where_parameters_or_their_update_are_sharded(
    start: Any, tmp_path: Path, way: dict[str, Any], part: str, odd: list[int]
) -> None:
    gang = begin(start, tmp_path, 1, flips=_flips(part, 6), **{**GIVEN, "steps": 7}, **way)
    codes = gang.wait()
    assert [rank for rank, code in enumerate(codes) if code == ExitCode.COPIES_DIFFER] == odd, gang.logs()
    assert all(codes) == bool(odd)


def test_no_checkpoint_is_saved_of_copies_that_differ(start: Any, tmp_path: Path) -> None:
    gang = begin(start, tmp_path, 1, flips=_flips("dense", 4), **{**GIVEN, "hashed_every": 1000})
    assert ExitCode.COPIES_DIFFER in gang.wait()
    assert list_checkpoints(tmp_path)[0] == []
