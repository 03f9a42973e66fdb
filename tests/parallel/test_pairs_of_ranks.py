"""Pairs of answers in every layout, scored before their stage by the same ranks, and the same after a kill."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_api.progress import ALL_SETS
from polyreme_datahub.objects import open_store
from polyreme_trainer.train.reference_scores import Scored, ScoreStore
from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import TOLERANCE, name
from tests.parallel.pages import Pages

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

PREFER = {"kind": "Preference", "beta": "0.5"}
BUBBLES = {"schedule": "ZBVZeroBubble", "layers": [1, 1, 1, 0], "microbatches": 4}
LAYOUTS: tuple[tuple[dict[str, int], dict[str, Any]], ...] = (
    ({"cp": 2}, {}),
    ({"cp": 2, "tp": 2, "ep": 4}, {"dense_tokens_max": 0, "logits_max": 1 << 13}),
    ({"dp": 2, "cp": 2, "ulysses": 2, "ep": 4}, {"optimizer": {"zero1": True, "bucket_scalars": 40_000}}),
    ({"pp": 2}, {"pipeline": BUBBLES}),
    ({"dp": 4}, {"parameter_sharding": "FSDP2", "recompute": "full"}),
)


def test_pairs_have_the_loss_gradient_and_margins_of_one_process_in_every_layout(start: Any, tmp_path: Path) -> None:
    """Answers lie across the cuts of a stream; the reference is zero."""
    for long in (False, True):
        same: dict[str, Any] = {"steps": 2, "pairs_from": 1, "long": long}
        same["stages"] = [{"name": "prefer", "steps": 2, "objective": PREFER}]
        alone = gradients(start, tmp_path / f"alone {long}", (1, 1), **same)
        assert len(alone["measured"][0]) == 5
        for layout, more in LAYOUTS[:3] if long else LAYOUTS[2:]:
            seen = gradients(start, tmp_path / f"{name(layout)} {long}", layout, **same, **more)
            assert largest_difference(seen, alone) <= TOLERANCE, layout
            assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE, abs=TOLERANCE), layout
            for one, other in zip(seen["measured"], alone["measured"], strict=True):
                assert one == pytest.approx(other, rel=1e-4), layout
            assert seen["biases"] == alone["biases"], "they do not move"


def records(root: Path, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "steps" / f"a{attempt:06d}.jsonl").read_text().splitlines()]


def scored(root: Path) -> list[str]:
    """What the phase said."""
    lines = [json.loads(line) for line in (root / "progress.jsonl").read_text().splitlines()]
    return [line["message"] for line in lines if line["phase"] == "Scoring"]


@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        pytest.param({"dp": 2, "ep": 2}, None, marks=pytest.mark.soak),
        ({"cp": 2, "pp": 2}, {"schedule": "1F1B", "layers": [1, 2], "microbatches": 2}),
        pytest.param({"dp": 2}, None, marks=pytest.mark.soak),  # with sharded parameters
    ],
    ids=str,
)
def test_a_stage_begins_at_log_2_and_a_resume_anywhere_changes_nothing(
    start: Any, tmp_path: Path, layout: dict[str, int], pipeline: dict[str, Any] | None
) -> None:
    """Two steps of text, then pairs that come a second time; a resume within the stage has the scores of before."""
    stages = [{"name": "text", "steps": 2}, {"name": "prefer", "steps": 5, "objective": PREFER}]
    run = {"steps": 7, "stages": stages, "pairs_from": 3, "layout": layout, "pipeline": pipeline, "kept": 9}
    run |= {"parameter_sharding": "FSDP2"} if layout == {"dp": 2} else {}
    run |= {"root": tmp_path, "interval": 3, "questions": 3, "evaluated_every": 2, "scores": str(tmp_path / "scores")}
    done = start("train", **run)
    assert set(done.wait()) == {0}, done.logs()
    whole = records(tmp_path, 1)
    first = whole[2]
    assert first["loss"] == pytest.approx(math.log(2), rel=1e-6)
    assert first["objective"]["rewardMargin"] == first["objective"]["referenceDrift"] == 0.0
    assert whole[6]["objective"]["rewardMargin"] > 0.0
    assert whole[1]["objective"] == whole[1]["heldOutPairs"] == {}
    assert whole[3]["heldOutPairs"].keys() == {ALL_SETS, "odd", "even"}
    assert whole[5]["heldOutPairs"][ALL_SETS] > 0.5
    begun, ended = scored(tmp_path)
    pairs = ended.split()[0]
    assert begun == f"0 of {pairs} pairs have a reference score, 0 made by this run"
    assert ended == f"{pairs} of {pairs} pairs have a reference score, {pairs} made by this run"
    for attempt, step in ((2, 2), (3, 3)):
        again = start("train", **run, attempt=attempt, resume_from=f"a000001-s{step:08d}")
        assert set(again.wait()) == {0}, again.logs()
        for one, other in zip(records(tmp_path, attempt), whole[step:], strict=True):
            for measured in ("loss", "objective", "heldOutPairs"):
                assert one[measured] == other[measured], (attempt, measured)
    assert len(scored(tmp_path)) == 2, "nothing was scored again"
    second = tmp_path / "second"
    other = start("train", **run | {"root": second})
    assert set(other.wait()) == {0}, other.logs()
    assert scored(second) == [f"{pairs} of {pairs} pairs have a reference score, 0 made by this run"]
    assert [record["loss"] for record in records(second, 1)] == [record["loss"] for record in whole]


ONLINE = {**PREFER, "reference": {"scores": "Online"}}
OTHER = {"layout": {"dp": 2}, "parameter_sharding": "FSDP2", "pipeline": None}


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ({"layout": {"dp": 2, "ep": 2}, "precision": "bfloat16", "optimizer": {"zero1": True}}, {}),
        ({"layout": {"dp": 1}, "adapters": {}}, {}),
        pytest.param({"layout": {"cp": 2, "pp": 2}, "pipeline": BUBBLES}, OTHER, marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_scores_of_each_step_train_as_those_of_before(
    start: Any, tmp_path: Path, given: dict[str, Any], other: dict[str, Any]
) -> None:
    """Also after a resume within the stage, in any layout, from the copy of its first weights."""
    run = online_run(tmp_path / "online", **given)
    before = {**run, "root": tmp_path / "cached", "stages": stages_of(PREFER)}
    trained: list[list[dict[str, Any]]] = []
    for request in (before, run, {**run, **other, "attempt": 2, "resume_from": "a000001-s00000004"}):
        done = start("train", **request)
        assert set(done.wait()) == {0}, done.logs()
        trained.append(records(request["root"], request.get("attempt", 1)))
    assert scored(run["root"]) == [], "nothing is scored before"
    cached, online, again = trained
    assert online[4]["objective"]["referenceDrift"] > 0.0
    for measured in ("loss", "objective", "heldOutPairs"):
        assert [record[measured] for record in online] == [record[measured] for record in cached]
        whole = online[4][measured]
        assert again[0][measured] == (pytest.approx(whole, rel=1e-5) if other else whole)


def test_a_run_that_starts_within_a_stage_takes_its_reference_over(start: Any, tmp_path: Path) -> None:
    """Without it, the stage can't continue: the model of then is gone."""
    first, second = tmp_path / "first", tmp_path / "second"
    whole = start("train", **online_run(first))
    assert set(whole.wait()) == {0}, whole.logs()
    taken = start("train", **online_run(second), start_from=[str(first), "a000001-s00000004"])
    assert set(taken.wait()) == {0}, taken.logs()
    assert records(second, 1)[0]["loss"] == records(first, 1)[4]["loss"]
    shutil.rmtree(first / "reference-weights")
    again = {**online_run(second), "attempt": 2, "resume_from": "a000001-s00000005", "steps": 6}
    again["stages"] = stages_of(ONLINE, steps=4)
    done = start("train", **again)
    assert set(done.wait()) == {0}, "it has a copy of its own"
    lost = start("train", **online_run(first), attempt=2, resume_from="a000001-s00000004")
    assert set(lost.wait()) == {ExitCode.USAGE}
    assert "its reference is the model before step 3" in lost.logs()


def test_a_named_reference_scores_the_pairs_that_can_be_read(start: Any, tmp_path: Path) -> None:
    """A damaged pair is waited for no longer than it takes to read its step, and is not learned."""
    objective = {**PREFER, "reference": {"name": "mine"}}
    pages = Pages(pairs_from=1, hole_every=4)
    planned = pages.pairs(1, first=0, count=pages.packs_per_step)[:, 1]
    readable = np.asarray(pages.packs(1, first=0, count=pages.packs_per_step).branches_B4)[::2, 3]
    assert 0 < len(readable) < len(planned)
    (of,) = pages.preference_sets
    assert of is not None
    scored_by_others = Scored.of(readable, np.zeros((len(readable), 2)))
    ScoreStore(open_store((tmp_path / "scores").as_uri()), "mine", [of]).commit(0, readable, scored_by_others)
    run = {"steps": 1, "stages": [{"name": "prefer", "steps": 1, "objective": objective}], "data_wait_s": 60.0}
    run |= {"pairs_from": 1, "hole_every": 4, "layout": {"dp": 2}, "scores": str(tmp_path / "scores")}
    done = start("train", **run, root=tmp_path)
    assert set(done.wait()) == {0}, done.logs()
    assert records(tmp_path, 1)[0]["objective"]["referenceDrift"] > 0.0
    assert scored(tmp_path)[-1].startswith(f"{len(readable)} of {len(planned)} pairs have a reference score")


def stages_of(objective: dict[str, Any], steps: int = 3) -> list[dict[str, Any]]:
    return [{"name": "text", "steps": 2}, {"name": "prefer", "steps": steps, "objective": objective}]


def online_run(root: Path, **given: Any) -> dict[str, Any]:
    """Two steps of text, then three of pairs that are scored in each step."""
    run = {"steps": 5, "stages": stages_of(ONLINE), "pairs_from": 3, "kept": 9, "interval": 2, "root": root}
    return {**run, "layout": {"dp": 1}, "questions": 3, "evaluated_every": 2, **given}
