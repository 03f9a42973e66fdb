"""The data engine of a processed job: the process that a launcher starts, over real indexes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from polyreme_api import environment as names
from polyreme_api.errors import EnvironmentFailedError, RefusedError
from polyreme_api.job import parse_job
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.client import BATCH_ARRAYS, EngineSource, OpenRequest
from polyreme_datahub.loader.open import open_packs, sleep_really
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_launcher.data_engine import DataEngine
from tests.unit.datahub.jobs import Home, digits, fix_points, make_spec

pytestmark = pytest.mark.slow
JOB = "uid-1"
SPLIT = StepSplit(data_ranks=2)


def job_file(folder: Path, **changes: object) -> str:
    spec = make_spec(["one", "three"], weights=[1, 0], schedule=[(4, [1, 1])]).model_dump(mode="json", by_alias=True)
    spec["data"] |= changes
    job = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "t"}, "spec": spec}
    path = folder / "job.json"
    path.write_text(json.dumps(job))
    return str(path)


def opened(engine: DataEngine, attempt: int, job: str, *, pixels: bool) -> EngineSource:
    assert engine.descriptor is not None
    asked = OpenRequest(attempt=attempt, job=job, split=SPLIT, pixels=pixels)
    return EngineSource(engine.descriptor, asked, open_wait_s=5.0, pixels=pixels)


@pytest.mark.parametrize("packs_by", ["Order", "Cost"])
def test_packs_grids_patches_and_states_of_a_job_are_those_of_its_index(tmp_path: Path, packs_by: str) -> None:
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    for name, count in (("one", 1), ("three", 3)):
        home.register(name, digits(count, pages=60))
    path = job_file(tmp_path, packsBy=packs_by)
    spec = parse_job(json.loads(Path(path).read_text())).spec
    home.process(spec, job=JOB)
    variables = {
        **os.environ,
        names.OBJECTS_URL: home.objects,
        names.JOB_UID: JOB,
        names.CHECKPOINT_URL: fix_points(tmp_path / "checkpoints"),
    }
    engine = DataEngine(directory=tmp_path, environment=variables)
    engine.begin_attempt()
    try:
        direct = open_packs(home.objects, spec, job=JOB, wait_s=0.0, sleep=sleep_really, split=SPLIT)
        source = opened(engine, 1, path, pixels=True)
        ordered = job_packs.open_source(home.objects, spec, job=JOB)
        moved = [list(of.packs(5, first=0, count=4).sample_ids) for of in (source, ordered)]
        assert (moved[0] != moved[1]) == (packs_by == "Cost")
        for step in (1, 2, 3, 4, 5, 30, 2):
            ours, theirs = (one.packs(step, first=1, count=2) for one in (source, direct))
            for name in BATCH_ARRAYS:
                np.testing.assert_array_equal(np.asarray(getattr(ours, name)), np.asarray(getattr(theirs, name)))
            assert (ours.sample_ids, ours.unmasked_tokens) == (theirs.sample_ids, theirs.unmasked_tokens)
            assert list(ours.lost_images) == list(theirs.lost_images)
            for one, other in zip(*(of.grids(step, first=0, count=4) for of in (source, direct)), strict=True):
                np.testing.assert_array_equal(np.asarray(one), np.asarray(other))
            images = range(len(direct.grids(step, first=0, count=1)[0]))
            found, expected = (np.asarray(of.patches(step, pack=0, images=images)) for of in (source, direct))
            np.testing.assert_array_equal(found, expected)
        assert source.state(7) == direct.state(7)
        source.check_state(direct.state(30))
        with pytest.raises(RefusedError, match="loader state belongs to other data"):
            source.check_state({"data": "others"})
        source.close()
        bare = opened(engine, 2, path, pixels=False)
        batch, whole = (of.packs(2, first=0, count=4) for of in (bare, direct))
        assert (batch.sample_ids, np.asarray(batch.patches_PC).size) == (whole.sample_ids, 0)
        np.testing.assert_array_equal(np.asarray(batch.tokens_T), np.asarray(whole.tokens_T))
        with pytest.raises(RefusedError, match="opened without pixels"):
            bare.patches(2, pack=0, images=[0])
        bare.close()
        other = job_file(tmp_path, seed=99, waitSeconds=0, tokenizer={"vocabulary": 300})
        with pytest.raises(EnvironmentFailedError, match="data is not processed") as missing:
            opened(engine, 3, other, pixels=True)
        assert missing.value.field == "spec.data.waitSeconds"
    finally:
        engine.close()
