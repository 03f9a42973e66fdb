"""Learning rates follow their formulas, step by step."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from polyreme_datahub.objects import open_store
from polyreme_planner.curriculum import CurriculumStage, OwnRate
from polyreme_planner.layout import Layout
from polyreme_planner.learning_rate import COSINE, RateSchedule, learning_rate
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train.learning_rate import rate_of
from polyreme_trainer.train.settings import CheckpointSettings, OptimizerSettings, TrainSettings


def rates(steps: int, **settings: object) -> list[float]:
    shape = RateSchedule(learning_rate=1.0, **settings)  # type: ignore[arg-type]
    return [learning_rate(step, shape, steps=steps) for step in range(1, steps + 1)]


def test_the_learning_rate_rises_stays_and_falls_to_its_last_step() -> None:
    seen = rates(20, warmup_steps=4, decay_steps=5)
    assert seen[:5] == [0.25, 0.5, 0.75, 1.0, 1.0]
    assert seen[14:] == pytest.approx([1.0, 1.0, 0.8, 0.6, 0.4, 0.2])


def test_without_warm_up_and_decay_the_rate_is_constant() -> None:
    assert set(rates(3, warmup_steps=0, decay_steps=0)) == {1.0}


def test_a_decay_ends_a_step_before_the_final_rate() -> None:
    assert rates(4, warmup_steps=0, decay_steps=4, final_learning_rate=0.2) == pytest.approx([1.0, 0.8, 0.6, 0.4])


def test_a_cosine_falls_from_the_end_of_the_warm_up_slowly_at_first_and_at_last() -> None:
    seen = rates(12, warmup_steps=2, schedule=COSINE, final_learning_rate=0.1)
    expected = [0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * gone / 10)) for gone in range(10)]
    assert seen[2:] == pytest.approx(expected)
    assert seen[:2] == pytest.approx([0.5, 1.0])


def test_a_cosine_over_the_last_steps_stays_before_them() -> None:
    seen = rates(12, warmup_steps=2, decay_steps=4, schedule=COSINE)
    assert seen[1:9] == pytest.approx([1.0] * 8)
    assert seen[9:] == pytest.approx([0.5 * (1 + math.cos(math.pi * gone / 4)) for gone in (1, 2, 3)])


def test_a_stage_has_a_schedule_of_its_own_where_it_names_one(tmp_path: Path) -> None:
    own = OwnRate(learning_rate=0.5, final_learning_rate=0.1, warmup_steps=2, decay_steps=2)
    cosine = OwnRate(schedule="Cosine")
    settings = TrainSettings(
        rank=RankSettings(rank=0, world=1, attempt=1),
        layout=Layout(),
        shape=KIMI_VL_NANO,
        steps=16,
        curriculum=(
            CurriculumStage(name="first", steps=4),
            CurriculumStage(name="own", first_step=5, steps=6, rate=own),
            CurriculumStage(name="cosine", first_step=11, steps=4, rate=cosine),
            CurriculumStage(name="last", first_step=15, steps=2),
        ),
        checkpoint=CheckpointSettings(store=open_store(tmp_path.as_uri())),
        optimizer=OptimizerSettings(learning_rate=1.0, warmup_steps=4, decay_steps=4, final_learning_rate=0.2),
    )
    seen = [rate_of(step, settings) for step in range(1, 17)]
    assert seen[:4] == [0.25, 0.5, 0.75, 1.0], "the optimizer's warm-up"
    assert seen[4:10] == pytest.approx([0.25, 0.5, 0.5, 0.5, 0.5, 0.3])
    assert seen[10:14] == pytest.approx([0.2 + 0.8 * 0.5 * (1 + math.cos(math.pi * gone / 4)) for gone in range(4)])
    assert seen[14:] == pytest.approx([0.6, 0.4]), "the optimizer's decay, over the run's last steps"
