"""Weights that ranks train, sent to the layout in which they draw answers: the same bits, and no byte too many."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from polyreme_api.exit_codes import ExitCode
from polyreme_planner.layout import Layout
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import STACKED, outline
from polyreme_trainer.model.sharding import cut_of
from polyreme_trainer.parallel.mesh import dense_place, experts_of, sparse_place
from tests.parallel.resharding_ranks import BUCKET_BYTES

pytestmark = [pytest.mark.parallel, pytest.mark.slow]


def request(root: Path, ep: int, **more: Any) -> dict[str, Any]:
    objective = {"kind": "GroupRelative", "reward": "a:b", "generation": {"parallelism": {"ep": ep}}}
    return {"root": root, "stages": [{"steps": 1, "objective": objective}], "steps": 1, **more}


def found(start: Any, **given: Any) -> list[dict[str, Any]]:
    done = start("reshard", **given)
    assert set(done.wait()) == {0}, done.logs()
    return [json.loads(path.read_text()) for path in sorted(given["root"].glob("found-*.json"))]


def volume(layout: Layout, ep: int, *, rows: int = 1, split: tuple[int, ...] = (), number_bytes: int = 4) -> int:
    """Bytes that all ranks together lack: of a tensor that 1 of t x p ranks holds a part, all others do (HybridFlow).

    Args:
        layout: Of training.
        ep: Of generation.
        rows: Ranks that share the rows of a parameter.
        split: Layers of each stage.
        number_bytes: Of what travels, but for routers.
    """
    drawn, decoder = Layout(dp=layout.world, ep=ep), KIMI_VL_NANO.decoder
    stages = [stage for stage, layers in enumerate(split or (decoder.layers,)) for _ in range(layers)]
    total = 0.0
    for name, tensor in outline(KIMI_VL_NANO).items():
        exact = name.endswith(("gate.weight", "e_score_correction_bias"))
        size = tensor.numel() * (4 if exact else number_bytes)
        whole_rows = exact or name == "language_model.model.norm.weight"
        last = name.startswith(("language_model.lm_head", "language_model.model.norm"))
        layered = ".model.layers." in name
        stage = stages[int(name.split(".")[3])] if layered else (stages[-1] if last else 0)
        for rank in range(layout.world):
            wanted, own = set(range(decoder.experts)), set(range(decoder.experts))
            share = 1 / (layout.tp if cut_of(name) else 1) / (1 if whole_rows else rows)
            if name.endswith(STACKED):
                wanted = set(experts_of(drawn, rank, decoder.experts))
                held = np.array_split(experts_of(layout, rank, decoder.experts), layout.edp if rows > 1 else 1)
                own, share = set(held[sparse_place(layout, rank)["edp"] if rows > 1 else 0].tolist()), 1.0
            if dense_place(layout, rank)["pp"] != stage:
                own = set()
            total += size * (len(wanted) - share * len(wanted & own)) / decoder.experts
    return round(total)


@pytest.mark.parametrize(
    ("layout", "ep", "more", "types"),
    [
        ({"pp": 2, "tp": 2, "ep": 2}, 4, {"pipeline": {"schedule": "1F1B", "layers": [1, 2], "microbatches": 2}}, 1),
        ({"dp": 2}, 1, {"parameter_sharding": "FSDP2", "precision": "bfloat16"}, 2),
        ({"dp": 4, "ep": 2}, 1, {"precision": "bfloat16", "optimizer": {"zero1": True}}, 2),
    ],
    ids=str,
)
def test_weights_arrive_and_no_byte_too_many(
    start: Any, tmp_path: Path, layout: dict[str, int], ep: int, more: dict[str, Any], types: int
) -> None:
    seen = found(start, layout=layout, **request(tmp_path, ep, **more))
    assert [each["wrong"] for each in seen] == [[]] * Layout(**layout).world
    assert [len(each["types"]) for each in seen] == [types] * len(seen)
    bound = [each["largest"] for each in seen]
    assert max(bound) <= BUCKET_BYTES
    assert seen[0]["rounds"] > 1
    rows = layout["dp"] if "parameter_sharding" in more else 1
    split = tuple(more.get("pipeline", {}).get("layers", ()))
    expected = volume(Layout(**layout), ep, rows=rows, split=split, number_bytes=2 if types == 2 else 4)
    assert sum(each["received"] for each in seen) == expected


def test_a_weight_that_changes_on_its_way_is_named(start: Any, tmp_path: Path) -> None:
    done = start("reshard", layout={"tp": 2}, **request(tmp_path, 1, bug="bit flips on its way"))
    assert set(done.wait()) == {ExitCode.ENVIRONMENT}
    assert "differ from those in training after their exchange: model." in done.logs()
    assert "checksum" in done.logs()
