"""Plans of earlier releases: a job that has begun keeps its order and its pixels."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from polyreme_api.errors import RefusedError
from polyreme_datahub.index.format import EVEN, NEWEST, WINDOWED, parse_plan, plan_key, seal_plan
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader import job_packs
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
