"""The planner against runs that others have published; the benchmark prints the whole table."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks/planner/published.py"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published", BENCHMARK)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules["published"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_published_runs_come_in_their_order_whichever_is_calibrated_on(published: ModuleType) -> None:
    found = published.compared()
    assert [of.on for of in found] == [run.name for run in published.RUNS]
    assert all(of.ordered for of in found)


@pytest.mark.slow
def test_runs_of_one_framework_predict_each_other(published: ModuleType) -> None:
    megatron = [run for run in published.RUNS if run.hardware.name == "h100-80g"]
    assert len(megatron) == 2
    for of in published.compared():
        errors = [abs(of.mfu[run.name] / run.mfu - 1) for run in megatron]
        assert of.on == "DeepSeek-V3" or max(errors) <= 0.15
