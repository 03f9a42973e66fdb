"""Ranks that share a model start from given weights bit by bit, or all fail with the same message."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from polyreme_api.batch import TokenIds, TokenizerFile
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from tests.exports import export_model

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

TOKENS = [{"id": 0, "content": "pad"}, {"id": 1, "content": "end"}, {"id": 5, "content": "media"}]
TOKENIZER = json.dumps({"added_tokens": TOKENS})
MORE_TOKENS = TOKENIZER.replace("]", ', {"id": 2, "content": "more"}]')
FIRST_OF_THE_SECOND_RANK = "language_model.model.layers.2.mlp.experts.4.down_proj.weight"


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A whole model under Kimi-VL's names, other than the ranks would draw."""
    state = build_model(KIMI_VL_NANO, seed=77, media_token=5).state_dict()
    for name, tensor in state.items():
        if tensor.ndim == 1:
            tensor.copy_(torch.randn(tensor.shape, generator=torch.Generator().manual_seed(len(name))))
    tokens = TokenIds(media=5, end=1, pad=0)
    tokenizer = TokenizerFile(content=TOKENIZER.encode(), chat_template="", image_tokens_max=80, pixel_version=2)
    export_model(state, KIMI_VL_NANO, tmp_path / "weights", tokens=tokens, tokenizer=tokenizer)
    return tmp_path / "weights"


@pytest.mark.parametrize(
    ("layout", "pipeline"),
    [
        (
            {"pp": 2, "tp": 2, "ep": 2},
            {"schedule": "DualPipeV", "layers": [0, 1, 1, 1], "microbatches": 4},
        ),
        ({"dp": 2, "cp": 2, "ep": 4}, None),
    ],
    ids=["pp2 tp2 ep2", "dp2 cp2 ep4"],
)
def test_what_ranks_begin_with_is_what_the_files_hold(
    start: Any, weights: Path, tmp_path: Path, layout: Any, pipeline: Any
) -> None:
    """They export before any step: the same bytes, the text part too."""
    own = tmp_path / "own"
    gang = start(
        "start from",
        layout=layout,
        root=tmp_path / "run",
        weights=str(weights),
        export=str(own),
        pipeline=pipeline,
        tokenizer=MORE_TOKENS,
    )
    assert gang.wait() == [0] * 4, gang.logs()
    files = {str(path.relative_to(weights)) for path in weights.rglob("*") if path.is_file()}
    assert len(files) > 5
    assert files == {str(path.relative_to(own)) for path in own.rglob("*") if path.is_file()}
    differ = {file for file in files if (own / file).read_bytes() != (weights / file).read_bytes()}
    assert differ == {"tokenizer.json", "text/tokenizer.json"}


def test_weights_of_another_tokenizer_end_all_ranks(start: Any, weights: Path, tmp_path: Path) -> None:
    gang = start(
        "start from",
        layout={"dp": 2},
        root=tmp_path,
        weights=str(weights),
        export=str(tmp_path / "own"),
        tokenizer=TOKENIZER.replace("end", "stop"),
    )
    assert gang.wait() == [2, 2], gang.logs()
    said = "1 of its 3 tokens mean other text in the job's, the first is 1, 'end' in tokenizer.json"
    assert gang.logs().count(said) == 2


def test_a_decoder_alone_begins_with_the_text_part_and_trains_where_all_is_shared(
    start: Any, weights: Path, tmp_path: Path
) -> None:
    """The same first loss in both layouts: cut streams, layers and experts, and one rank."""
    losses: list[list[float]] = []
    for layout in ({"cp": 2, "tp": 2, "ep": 4}, {"dp": 1}):
        run = tmp_path / str(len(losses))
        gang = start("train", layout=layout, root=run, weights=str(weights / "text"), steps=2, text=True)
        assert set(gang.wait()) == {0}, gang.logs()
        lines = (run / "steps" / "a000001.jsonl").read_text().splitlines()
        losses.append([json.loads(line)["loss"] for line in lines])
    assert len(losses[0]) == 2
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_a_weight_that_is_not_finite_ends_every_rank_before_any_step_though_one_alone_reads_it(
    start: Any, weights: Path, tmp_path: Path
) -> None:
    for file in weights.glob("*.safetensors"):
        tensors = load_file(file)
        if FIRST_OF_THE_SECOND_RANK in tensors:
            tensors[FIRST_OF_THE_SECOND_RANK][0, 0] = float("nan")
            save_file(tensors, file)
    gang = start("train", layout=(2, 2), root=tmp_path / "run", weights=str(weights), steps=3)
    assert gang.wait() == [2, 2]
    words = f"weights are not finite: {FIRST_OF_THE_SECOND_RANK} has 1 NaN and 0 Inf among 6144 values, expected none"
    for rank in range(2):
        assert words in (tmp_path / "run" / f"rank-{rank}.log").read_text()
    assert not list((tmp_path / "run").rglob("steps/*"))
