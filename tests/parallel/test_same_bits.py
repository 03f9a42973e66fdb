"""The bits of a loss depend on data and weights alone: not on the heap, and not on where a batch lies in memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from polyreme_api.history import steps_key
from polyreme_api.job import parse_job
from polyreme_api.progress import StepRecord
from polyreme_planner.plan import plan_for
from polyreme_planner.plan_inputs import setting_of
from polyreme_planner.refusals import memory_of_cut
from tests.unit.api.jobs import job_with

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

STEPS = 5


def losses(start: Any, root: Path, **request: Any) -> list[tuple[float, float]]:
    gang = start("train", layout=(2, 2), root=root, steps=STEPS, interval=STEPS, **request)
    assert gang.wait() == [0, 0], gang.logs()
    lines = (root / steps_key(1)).read_text().splitlines()
    records = [StepRecord.model_validate_json(line) for line in lines]
    return [(record.loss, record.gradient_norm) for record in records]


def test_five_steps_have_the_same_bits_in_whatever_state_the_heap_is(start: Any, tmp_path: Path) -> None:
    aligned = losses(start, tmp_path / "aligned")
    assert len(aligned) == STEPS
    for begin_bytes, litter in [(8, 0), (16, 1), (40, 2), (56, 3)]:
        root = tmp_path / f"{begin_bytes}-{'x' * 40 * litter}"
        assert losses(start, root, begin_bytes=begin_bytes, litter=litter) == aligned, (begin_bytes, litter)


def job(recompute: str, memory_bytes: int) -> dict[str, Any]:
    """The spec that these ranks train, with so much memory each."""
    container = {"name": "worker", "resources": {"limits": {"memory": str(memory_bytes)}}}
    changes = {
        "spec.data.sequenceTokens": 96,
        "spec.training": {"steps": STEPS, "packsPerStep": 4, "recompute": recompute},
        "spec.parallelism": {"mode": "Explicit", "dp": 2, "ep": 2},
        "spec.workers": {"replicas": 2, "template": {"spec": {"containers": [container]}}},
    }
    spec: dict[str, Any] = job_with(changes)["spec"]
    return spec


def test_recompute_makes_a_job_fit_and_keeps_its_gradients(start: Any, tmp_path: Path) -> None:
    spec = parse_job(job_with({"spec": job("None", 1 << 32)})).spec
    plan = plan_for(spec)
    memory = memory_of_cut(setting_of(spec, plan.shape), plan.layout, plan.cut, packs_per_step=4)
    jobs = {
        "roomy": job("Auto", 1 << 32),
        "tight": job("Auto", memory.total_bytes),
        "named": job("Selective", memory.total_bytes),
    }
    learned = {name: losses(start, tmp_path / name, job=spec) for name, spec in jobs.items()}
    assert learned["tight"] == learned["named"] == learned["roomy"]
    layers = plan.shape.decoder.layers + plan.shape.vision.layers
    regions = {name: [int((tmp_path / name / f"regions-{rank}").read_text()) for rank in (0, 1)] for name in jobs}
    assert regions == {"roomy": [0, 0], "tight": [layers * STEPS] * 2, "named": [layers * STEPS] * 2}


def test_a_batch_that_is_not_copied_is_seen(start: Any, tmp_path: Path) -> None:
    seen = {
        tuple(losses(start, tmp_path / str(begin), begin_bytes=begin, bug="batches are not copied"))
        for begin in (0, 8, 16, 40)
    }
    assert len(seen) > 1
