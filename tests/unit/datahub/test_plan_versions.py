"""Plans keep what a job began with: order and pixels of an earlier release, the steps of its epochs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError, RefusedError
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.index.format import EVEN, NEWEST, WINDOWED, parse_plan, plan_key, seal_plan
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.open import open_steps
from tests.unit.datahub.jobs import Home, digits, make_spec

pytestmark = pytest.mark.slow


def test_a_job_that_began_with_an_earlier_release_keeps_its_order_and_its_pixels(tmp_path: Path) -> None:
    home, spec = Home(tmp_path), make_spec(["one"])
    home.register("one", digits(1, pages=20))
    home.process(spec, job="begun")
    file = tmp_path / "objects" / plan_key("begun", plan_data(spec))
    plan = parse_plan(file.read_bytes(), file.name)
    assert {field: plan[field] for field in NEWEST} == NEWEST
    older = {field: value for field, value in plan.items() if field not in NEWEST}
    file.write_text(json.dumps(seal_plan(older)))
    home.process(spec, job="begun")
    assert parse_plan(file.read_bytes(), file.name) == older
    assert job_packs.open_source(home.objects, spec, job="begun")._steps.plan.version == WINDOWED
    file.write_text(json.dumps(seal_plan({**plan, "order": EVEN + 1})))
    with pytest.raises(RefusedError, match="samples are ordered in a way of a newer release: 3, this release reads up"):
        job_packs.open_source(home.objects, spec, job="begun")


def test_the_steps_of_epochs_are_counted_once_and_kept_in_the_plan(tmp_path: Path) -> None:
    home = Home(tmp_path)
    home.register("few", digits(1, pages=20))
    given = make_spec(["few"], packs_per_step=1).model_dump(mode="json", by_alias=True, exclude_none=True)
    del given["training"]["steps"]

    def of_epochs(epochs: int, *, packs: int = 1, **optimizer: Any) -> TrainingJobSpec:
        training = {**given["training"], "epochs": epochs, "packsPerStep": packs, "optimizer": optimizer}
        return TrainingJobSpec.model_validate({**given, "training": training})

    with pytest.raises(InvalidConfigError, match="the warm-up is longer than the run: 900 steps of"):
        home.process(of_epochs(2, warmupSteps=900), job="j")
    two, three = (home.process(of_epochs(epochs), job="j").steps for epochs in (2, 3))
    assert two is not None
    assert three is not None
    assert two < three
    again = home.process(of_epochs(2), job="j")
    assert again.steps == two
    assert open_steps(home.objects, of_epochs(3), job="j").training.steps == three
    assert home.process(of_epochs(2)).steps == two
    fewer = home.process(of_epochs(2, packs=2)).steps
    assert fewer is not None
    assert fewer < two, "without a job they are counted each time"
    with pytest.raises(EnvironmentFailedError, match="steps of 4 epochs are not counted"):
        open_steps(home.objects, of_epochs(4), job="j")
