"""Precision of a job: chosen by its hardware unless it names one, and priced at its own rate."""

from __future__ import annotations

from typing import Any

import pytest

from polyreme_api.job import parse_job
from polyreme_planner.hardware import HARDWARE
from polyreme_planner.plan_inputs import hardware_of, numerics_of
from polyreme_planner.precision import precision_of
from polyreme_planner.shapes import model_shape
from tests.unit.api.jobs import job_with

SHAPE = model_shape("kimi-vl-a3b", {})


def spec_on(hardware: str, **training: Any) -> Any:
    changes = {f"spec.training.{name}": value for name, value in training.items()}
    return parse_job(job_with(changes | {"spec.workers.hardware": hardware})).spec


@pytest.mark.parametrize(
    ("hardware", "asked", "expected"),
    [
        ("h100-80g", {}, "bfloat16"),
        ("h200-141g", {"precision": "Auto"}, "bfloat16"),
        ("cpu", {}, "float32"),
        ("h100-80g", {"precision": "float32"}, "float32"),
        ("cpu", {"precision": "bfloat16"}, "bfloat16"),
    ],
)
def test_the_hardware_decides_the_precision_unless_the_job_names_one(
    hardware: str, asked: dict[str, Any], expected: str
) -> None:
    spec = spec_on(hardware, **asked)
    assert precision_of(spec.training, hardware) == expected
    assert numerics_of(spec, SHAPE).weight_bytes == {"bfloat16": 2, "float32": 4}[expected]


@pytest.mark.parametrize(
    ("asked", "peak_tflops"),
    [({}, 989), ({"precision": "float32", "tf32": True}, 494.7), ({"precision": "float32"}, 67)],
)
def test_products_are_priced_at_the_rate_of_their_precision(asked: dict[str, Any], peak_tflops: float) -> None:
    hardware = hardware_of(spec_on("h100-80g", **asked))
    assert hardware.peak_flops_per_s / 1e12 == pytest.approx(peak_tflops)
    assert hardware.flops_per_s / hardware.peak_flops_per_s == pytest.approx(0.6)


def test_processors_have_one_rate() -> None:
    rates = {hardware_of(spec_on("cpu", precision=precision)).flops_per_s for precision in ("float32", "bfloat16")}
    assert rates == {HARDWARE["cpu"].flops_per_s}
