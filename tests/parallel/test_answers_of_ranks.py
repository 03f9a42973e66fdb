"""Every layout gives the answers of one process that answers one question after another."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.parallel.answering_ranks import LENGTHS
from tests.parallel.gangs import answered
from tests.parallel.grid import name

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

WAYS: tuple[dict[str, Any], ...] = (
    {"layout": {"pp": 2, "dp": 2, "ep": 2}, "pipeline": {"schedule": "1F1B", "layers": [1, 2], "microbatches": 2}},
    {"layout": {"dp": 2, "cp": 2, "tp": 2, "ep": 4}},
    {"layout": {"dp": 2, "ep": 2}, "parameter_sharding": "FSDP2"},
)


def test_answers_are_those_of_one_process_that_answers_one_by_one(start: Any, tmp_path: Path) -> None:
    alone = answered(start, tmp_path / "alone", rows=1, layout={"dp": 1})
    assert len(set(alone)) == len(LENGTHS)
    for way in WAYS:
        assert answered(start, tmp_path / name(way["layout"]), rows=4, **way) == alone, way
