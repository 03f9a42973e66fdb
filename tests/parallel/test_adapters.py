"""Adapters in every layout, over restarts and in exports: as in one process."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from polyreme_api.batch import TokenIds
from polyreme_api.progress import StepRecord
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from tests.exports import export_model
from tests.parallel.gangs import gradients, largest_difference
from tests.parallel.grid import TOLERANCE, name
from tests.parallel.pages import MEDIA

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

ADAPTERS: dict[str, Any] = {"adapters": {"alpha": 4.0}}
PIPELINE = {"schedule": "1F1B", "layers": [0, 3], "microbatches": 2}
"""The first stage has nothing that learns."""
BUBBLES = {"schedule": "ZBVZeroBubble", "layers": [1, 1, 1, 0], "microbatches": 4}
"""Gradients of weights are computed apart from those of inputs."""


LAYOUTS: list[tuple[dict[str, int], dict[str, Any]]] = [
    ({"tp": 2, "ep": 2}, {"recompute": "selective"}),
    ({"cp": 2, "ep": 2}, {"recompute": "full", "optimizer": {"zero1": True, "bucket_scalars": 10_000}}),
    ({"pp": 2}, {"pipeline": PIPELINE, "optimizer": {"zero1": True}}),
    ({"pp": 2}, {"pipeline": BUBBLES}),
]
MUON: list[tuple[dict[str, int], dict[str, Any]]] = [({"dp": 2}, {"fused_bytes_max": 0}), ({"tp": 2}, {})]


@pytest.mark.parametrize(("optimizer", "layouts"), [("AdamW", LAYOUTS), ("Muon", MUON)])
def test_adapters_have_the_gradient_and_the_losses_of_one_process(
    start: Any, tmp_path: Path, optimizer: str, layouts: list[tuple[dict[str, int], dict[str, Any]]]
) -> None:
    same: dict[str, Any] = {**ADAPTERS, "steps": 3, "decoder": {"q_rank": 24}}
    alone = gradients(start, tmp_path / "alone", (1, 1), **same, optimizer={"name": optimizer})
    assert all("lora" in tensor for tensor in alone["gradients"] if tensor != "norm")
    assert not any(any(biases) for biases in alone["biases"].values()), "they belong to the base"
    for number, (layout, more) in enumerate(layouts):
        of = {**more, "optimizer": {"name": optimizer, **more.get("optimizer", {})}}
        seen = gradients(start, tmp_path / f"{number} {name(layout)}", layout, **same, **of)
        assert largest_difference(seen, alone) <= TOLERANCE, layout
        assert seen["losses"] == pytest.approx(alone["losses"], rel=TOLERANCE), layout
        assert seen["biases"] == alone["biases"]


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """Weights other than the ranks would draw."""
    state = build_model(KIMI_VL_NANO, seed=77, media_token=MEDIA).state_dict()
    export_model(state, KIMI_VL_NANO, tmp_path / "base", tokens=TokenIds(media=MEDIA, end=1, pad=0))
    return tmp_path / "base"


def test_adapters_are_resumed_resharded_and_exported_beside_their_base_alone(
    start: Any, base: Path, tmp_path: Path
) -> None:
    run, middle = tmp_path / "run", "a000001-s00000002"
    adapted = {**ADAPTERS, "steps": 4, "interval": 2, "weights": str(base)}
    gang = start("train", layout={"tp": 2}, root=run, export=str(tmp_path / "own"), **adapted)
    assert gang.wait() == [0, 0], gang.logs()
    size = sum(path.stat().st_size for path in (run / middle).glob("*.bin"))
    assert size < 0.5 * sum(path.stat().st_size for path in base.glob("*.safetensors")), "it holds adapters alone"

    again = tmp_path / "again"
    shutil.copytree(run, again)
    alone = {"adapters_alone": True, "export": str(tmp_path / "own adapters")}
    gang = start("train", layout={"tp": 2}, root=again, attempt=2, resume_from=middle, **adapted, **alone)
    assert gang.wait() == [0, 0], gang.logs()
    assert losses(again, 2) == {step: loss for step, loss in losses(run, 1).items() if step > 2}

    for at, layout in (("shared", {"tp": 2}), ("alone", {"dp": 1})):
        output = str(tmp_path / at)
        gang = start("digests", layout=layout, root=run, resume_from=middle, output=output, **adapted)
        assert set(gang.wait()) == {0}, gang.logs()
    assert json.loads((tmp_path / "alone").read_text()) == json.loads((tmp_path / "shared").read_text())

    for what, more in (("merged", {}), ("adapters", {"adapters_alone": True})):
        last = {"resume_from": "a000001-s00000004", "output": str(tmp_path / what)}
        gang = start("offline", layout={"dp": 1}, root=run, **adapted, **last, **more)
        assert gang.wait() == [0], gang.logs()
    own, drawn = tensors(tmp_path / "own"), tensors(base)
    torch.testing.assert_close(tensors(tmp_path / "merged"), own, rtol=0, atol=1e-6)
    torch.testing.assert_close(tensors(tmp_path / "adapters"), tensors(tmp_path / "own adapters"), rtol=0, atol=0)
    moved = {name for name, tensor in own.items() if not tensor.equal(drawn[name])}
    assert {name.split(".")[-2] for name in moved} == {
        "q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj",
    }  # fmt: skip

    adapted.pop("weights")
    gang = start("train", layout={"dp": 1}, root=again, attempt=3, resume_from=middle, **adapted)
    assert gang.wait() == [4], gang.logs()
    assert f"adapters belong to other weights: those of {middle} were trained beside weights of digest" in gang.logs()


def losses(root: Path, attempt: int) -> dict[int, float]:
    lines = (root / "steps" / f"a{attempt:06}.jsonl").read_text().splitlines()
    return {record.step: record.loss for record in map(StepRecord.model_validate_json, lines)}


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}
