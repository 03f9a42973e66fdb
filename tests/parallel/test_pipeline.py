"""A pipeline trains the model of one process: gradients, losses, checkpoints, answers, export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import TOLERANCE
from tests.parallel.pipes import ALWAYS, LAYERS, TWO, Pipe, turn

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

NAME = "a000001-s00000003"
DECODER = {"layers": LAYERS}


def test_a_pipeline_has_the_gradient_and_the_losses_of_one_process(
    start: Any, tmp_path: Path, turn_number: int
) -> None:
    """Microbatches have different numbers of patches, one has none; a rank may hold the first stage and the last."""
    alone: dict[int, Any] = {}
    for pipe in [*ALWAYS, turn(turn_number)]:
        whole = {"steps": 2, "long": True, "decoder": DECODER, "packs": pipe.packs}
        if pipe.packs not in alone:
            alone[pipe.packs] = gradients(start, tmp_path / f"alone {pipe.packs}", (1, 1), **whole)
        seen = gradients(start, tmp_path / str(pipe), pipe.degrees, **(whole | pipe.request))
        assert largest_difference(seen, alone[pipe.packs]) <= TOLERANCE, pipe
        assert seen["losses"] == pytest.approx(alone[pipe.packs]["losses"], rel=TOLERANCE), pipe


def test_gradients_add_up_over_microbatches_without_stages_too(start: Any, tmp_path: Path) -> None:
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=2, long=True)
    seen = gradients(start, tmp_path / "parts", (2, 2), steps=2, long=True, pipeline={"microbatches": 2})
    assert largest_difference(seen, alone) <= TOLERANCE
    assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE)


@pytest.mark.parametrize(
    "bug",
    [
        "the loss is divided by the microbatches",
        "a microbatch runs twice and another never",
        "the norm knows this stage alone",
        "later stages are named one layer too low",
    ],
)
def test_a_planted_bug_in_a_pipeline_is_caught(start: Any, tmp_path: Path, bug: str) -> None:
    pipe = Pipe({"pp": 2}, "DualPipeV", TWO["DualPipeV"])
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=1, decoder=DECODER)
    broken = gradients(start, tmp_path / "broken", pipe.degrees, steps=1, bug=bug, **pipe.request)
    same_names = broken["gradients"].keys() == alone["gradients"].keys()
    assert not same_names or largest_difference(broken, alone) > 100 * TOLERANCE


def test_loads_of_a_stage_that_stand_at_another_ones_layers_are_seen(start: Any, tmp_path: Path) -> None:
    """They move the biases of the router, and so what later steps choose."""
    pipe = Pipe({"pp": 2}, "1F1B", TWO["1F1B"])
    right, wrong = (
        gradients(start, tmp_path / str(bug), pipe.degrees, steps=2, bug=bug, **pipe.request)
        for bug in (None, "a stage's loads stand at another stage's layers")
    )
    assert largest_difference(wrong, right) <= TOLERANCE, "the first step does not hang on them"
    assert wrong["biases"] != right["biases"]
    alone = gradients(start, tmp_path / "alone", (1, 1), steps=2, decoder=DECODER)
    assert right["biases"] == alone["biases"]


def test_a_checkpoint_of_stages_loads_bit_for_bit_into_any_layout(start: Any, tmp_path: Path) -> None:
    pipe = Pipe({"pp": 2, "dp": 1, "ep": 1}, "ZBVZeroBubble", TWO["ZBVZeroBubble"])
    assert start("train", layout=pipe.degrees, root=tmp_path, steps=3, **pipe.request).wait() == [0] * 2
    same = _digests(start, tmp_path, pipe)
    assert len(set(same.values())) > len(same) // 2, "tensors differ, moments are not all zero"
    others = [
        Pipe({"pp": 2, "dp": 2, "ep": 2}, "1F1B", (5, 3)),
        Pipe({"pp": 2, "tp": 2}, "Interleaved1F1B", TWO["Interleaved1F1B"]),
        Pipe({"dp": 2, "ep": 2}, "1F1B", ()),
    ]
    for other in others:
        assert _digests(start, tmp_path, other) == same, other


def test_an_attempt_goes_on_in_stages_where_another_ended_without(start: Any, tmp_path: Path) -> None:
    """And back: the loss of the last step is that of a run that never changed."""
    pipe = Pipe({"pp": 2}, "DualPipeV", TWO["DualPipeV"])
    whole: dict[str, Any] = {"decoder": DECODER, "interval": 2, "steps": 6}
    still, moved = tmp_path / "still", tmp_path / "moved"
    assert start("train", layout=(1, 1), root=still, **whole).wait() == [0]
    gang = start(
        "train", layout=(1, 1), root=moved, **whole, faults={5: "kill"}
    )  # step 4 was saved after step 2 was durable
    assert gang.wait() == [-9]
    piped = {**whole, **pipe.request, "attempt": 2, "resume_from": "a000001-s00000002"}
    assert start("train", layout=pipe.degrees, root=moved, **piped).wait() == [0, 0]
    losses = [
        [json.loads(line)["loss"] for line in path.read_text().splitlines()]
        for path in (still / "steps" / "a000001.jsonl", moved / "steps" / "a000002.jsonl")
    ]
    assert losses[1] == pytest.approx(losses[0][2:], rel=1e-4)


@pytest.mark.parametrize("degrees", [{"pp": 2, "dp": 2, "ep": 2}, {"pp": 2, "tp": 2}], ids=str)
def test_stages_answer_together_and_export_what_one_process_exports(
    start: Any, tmp_path: Path, degrees: dict[str, int]
) -> None:
    pipe = Pipe(degrees, "1F1B", TWO["1F1B"], microbatches=2)
    root, own, offline = tmp_path / "run", tmp_path / "own", tmp_path / "offline"
    run: dict[str, Any] = {"steps": 3, "interval": 2, "questions": 7, "capacity": 0.75, **pipe.request}
    gang = start("train", layout=degrees, root=root, export=str(own), **run)
    assert gang.wait() == [0] * 4, gang.logs()
    _check_routing(root)
    gang = start("offline", layout=(1, 1), root=root, resume_from=NAME, output=str(offline), decoder=DECODER)
    assert gang.wait() == [0], gang.logs()
    assert _files(offline) == _files(own)
    gang = start("train", layout=(1, 1), root=root, attempt=2, resume_from=NAME, steps=3, questions=7, decoder=DECODER)
    assert gang.wait() == [0], gang.logs()
    answers = [json.loads((root / "evaluation" / f"a00000{number}.json").read_text())["pages"] for number in (1, 2)]
    assert answers[0] == answers[1]


def _check_routing(root: Path) -> None:
    """The log has three numbers a step; the table has the window since the save after step 2, by layer and expert."""
    steps = [json.loads(line) for line in (root / "steps" / "a000001.jsonl").read_text().splitlines()]
    table = json.loads((root / "routing" / "a000001.json").read_text())
    assert (table["fromStep"], table["step"]) == (3, 3)
    assert [layer["layer"] for layer in table["layers"]] == list(range(1, LAYERS))
    assert sum(sum(layer["dropped"]) for layer in table["layers"]) == steps[2]["rowsDropped"] > 0
    fullest = max(max(layer["load"]) * len(layer["load"]) / sum(layer["load"]) for layer in table["layers"])
    assert steps[2]["expertLoadMax"] == pytest.approx(fullest)
    mean = sum(layer["entropy"] for layer in table["layers"]) / len(table["layers"])
    assert steps[2]["routerEntropy"] == pytest.approx(mean, rel=1e-5)
    assert all(layer["tokens"] * 2 == sum(layer["load"]) for layer in table["layers"])


def _digests(start: Any, root: Path, pipe: Pipe) -> dict[str, str]:
    output = root / "digests.json"
    request = {"decoder": DECODER} if not pipe.layers else pipe.request
    gang = start("digests", layout=pipe.degrees, root=root, resume_from=NAME, output=str(output), **request)
    assert set(gang.wait()) == {0}, gang.logs()
    found: dict[str, str] = json.loads(output.read_text())
    return found


def _files(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
