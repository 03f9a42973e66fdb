"""A run with curriculum stages: frozen parts stay bit for bit, and a stop in any stage changes nothing later."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme_planner.shapes import KIMI_VL_NANO
from tests.parallel.pages import HELD_OUT_STEP

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

STEPS = 8
LAYERS = 4
"""Of the decoder, so that each of four stages of a pipeline has one."""
ALIGN = {"name": "align", "steps": 2, "learners": ["Tower", "Projector"], "rate": {"learning_rate": 3e-3}}
JOINT = {"name": "joint", "steps": 2}
COOL = {
    "name": "cool",
    "steps": 2,
    "learners": ["Decoder"],
    "rate": {"final_learning_rate": 1e-4, "decay_steps": 2},
}
LONG = {"name": "long", "steps": 2, "rope_theta": 40_000.0, "rate": {"warmup_steps": 2}}
STAGES = [ALIGN, JOINT, COOL, LONG]
PACKED = {7: (4, 192)}
"""The last stage has half as many packs, of twice the tokens."""
MUON = {"name": "Muon", "weight_decay": 0.1, "zero1": True, "bucket_scalars": 40_000}
RUN = {"steps": STEPS, "stages": STAGES, "packs": 8, "packed": PACKED, "interval": 1, "kept": STEPS + 1}


def records(root: Path, attempt: int) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (root / "steps" / f"a{attempt:06d}.jsonl").read_text().splitlines()]


def trained(root: Path, attempt: int) -> list[tuple[float, ...]]:
    """What steps say of what was trained: also how tokens were routed, by which biases move."""
    quantities = "loss", "gradientNorm", "learningRate", "expertLoadMax", "routerEntropy"
    return [tuple(record[quantity] for quantity in quantities) for record in records(root, attempt)]


def states(start: Any, root: Path, *steps: int) -> list[dict[str, str]]:
    """Digests of all weights, moments and biases after some steps, by name."""
    output, names = root / "digests.json", [f"a000001-s{step:08d}" for step in steps]
    held = {"optimizer": {**MUON, "zero1": False}, "precision": "bfloat16"}
    gang = start("digests", layout={"dp": 1}, root=root, names=names, resume_from=names[0], output=str(output), **held)
    assert gang.wait() == [0], gang.logs()
    found = json.loads(output.read_text())
    return [found[name] for name in names]


def changed(before: dict[str, str], after: dict[str, str]) -> set[tuple[str, str]]:
    """Kinds of what differs, with the part of the model that it is of; routing biases are the decoder's."""
    assert before.keys() == after.keys()
    parts = {name: name.split(".")[:2] for name in before if before[name] != after[name]}
    return {(kind, "language_model" if kind == "bias" else part) for kind, part in parts.values()}


def test_what_a_stage_does_not_train_stays_and_a_resume_in_any_stage_changes_nothing(
    start: Any, tmp_path: Path
) -> None:
    """Divided Muon in bfloat16 over expert-parallel ranks; a resume crosses borders, or none."""
    run = {**RUN, "layout": {"dp": 2, "ep": 2}, "root": tmp_path, "optimizer": MUON, "precision": "bfloat16"}
    done = start("train", export=str(tmp_path / "export"), **run)
    assert done.wait() == [0] * 2, done.logs()
    whole = records(tmp_path, 1)
    assert [record["stage"] for record in whole] == ["align"] * 2 + ["joint"] * 2 + ["cool"] * 2 + ["long"] * 2
    assert [record["tokens"] for record in whole] == [8 * 96] * 6 + [4 * 192] * 2
    rates = [record["learningRate"] for record in whole]
    # The second stage goes on along the optimizer's schedule, the third falls by its own from the optimizer's peak.
    assert rates == pytest.approx([3e-3, 3e-3, 2e-3, 2e-3, 2e-3, (2e-3 + 1e-4) / 2, 1e-3, 2e-3])
    assert json.loads((tmp_path / "export" / "config.json").read_text())["text_config"]["rope_theta"] == 40_000.0
    told = [json.loads(line) for line in (tmp_path / "progress.jsonl").read_text().splitlines()][-1]
    assert (told["stage"], told["routing"]["firstLayer"], len(told["routing"]["entropy"])) == ("long", 1, 2)
    assert max(told["routing"]["loadMax"]) == pytest.approx(whole[-1]["expertLoadMax"], abs=1e-4)

    first, second, fifth, sixth = states(start, tmp_path, 1, 2, 5, 6)
    kinds = ("value", "first", "second", "momentum")
    tower = {(kind, part) for kind in kinds for part in ("vision_tower", "multi_modal_projector")}
    assert changed(first, second) == tower
    assert changed(fifth, sixth) == {(kind, "language_model") for kind in (*kinds, "bias")}
    for attempt, step in ((2, 3), (3, 7)):
        more = {"questions": 8, "evaluated_every": 3} if attempt == 2 else {}
        again = start("train", attempt=attempt, resume_from=f"a000001-s{step:08d}", **run, **more)
        assert again.wait() == [0] * 2, again.logs()
        assert trained(tmp_path, attempt) == trained(tmp_path, 1)[step:], "also with looks at what is held out"
    assert [of["step"] for of in records(tmp_path, 2) if of["heldOut"]] == [6, 8]
    assert not any(of["heldOut"] for attempt in (1, 3) for of in records(tmp_path, attempt))
    exported = start(
        "offline", layout={"dp": 1}, root=tmp_path, resume_from="a000001-s00000006", stages=STAGES, steps=STEPS,
        output=str(tmp_path / "sixth"),
    )  # fmt: skip
    assert exported.wait() == [0], exported.logs()
    assert json.loads((tmp_path / "sixth" / "config.json").read_text())["text_config"]["rope_theta"] == 10_000.0


def test_pipelines_and_rows_of_parameters_train_the_stages_of_one_process(start: Any, tmp_path: Path) -> None:
    """Also where all layers of a rank are frozen, and its orders make gradients of weights apart.

    Every token goes to every expert: a choice between two that score alike depends on a last bit. So does an update by
    AdamW where a gradient is near zero, unless its epsilon is larger than that.
    """
    held_out = {"questions": RUN["packs"], "evaluated_every": 4}
    decoder = {"layers": LAYERS, "experts_per_token": KIMI_VL_NANO.decoder.experts}
    run = {
        **RUN,
        **held_out,
        "interval": STEPS,
        "decoder": decoder,
        "optimizer": {"weight_decay": 0.1, "epsilon": 1e-5},
    }
    pipeline = {"schedule": "ZBVZeroBubble", "layers": [1] * LAYERS, "microbatches": 4}
    ways: dict[str, dict[str, Any]] = {
        "alone": {"layout": {"dp": 1}},
        "piped": {"layout": {"pp": 2, "tp": 2, "ep": 2}, "pipeline": pipeline},
        "rows": {"layout": {"dp": 2, "ep": 2}, "parameter_sharding": "FSDP2"},
    }
    found: dict[str, list[dict[str, Any]]] = {}
    for name, way in ways.items():
        gang = start("train", root=tmp_path / name, **way, **run)
        assert set(gang.wait()) == {0}, gang.logs()
        found[name] = records(tmp_path / name, 1)
        told = {record["step"]: record["heldOut"] for record in found[name] if record["heldOut"]}
        assert list(told) == [4, 8]
        before = told[HELD_OUT_STEP - 1]
        assert before.keys() == {"", "odd", "even"}
        assert before[""] == pytest.approx(found[name][HELD_OUT_STEP - 1]["loss"], rel=1e-5), "of the same packs"
        assert before["odd"] != before["even"]
    expected = found.pop("alone")
    for name, seen in found.items():
        assert [of["learningRate"] for of in seen] == [of["learningRate"] for of in expected]
        for quantity in ("loss", "gradientNorm"):
            ours, theirs = ([record[quantity] for record in of] for of in (seen, expected))
            assert ours == pytest.approx(theirs, rel=2e-5), (name, quantity)
        assert seen[7]["heldOut"] == pytest.approx(expected[7]["heldOut"], rel=2e-5), name
