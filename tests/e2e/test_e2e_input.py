"""What a finished run can be asked, and a checkpoint root that was swapped under it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.e2e.polyreme_home import PolyremeHome
from tests.e2e.small_jobs import small

pytestmark = [pytest.mark.slow, pytest.mark.parallel]

USAGE, NOT_FOUND, REFUSED = 2, 3, 4
NAME = "exported"
SPEC = small("sample/digits-1", steps=3, export={"format": "HuggingFace"})


@pytest.fixture(scope="module")
def finished(home: PolyremeHome) -> dict[str, Any]:
    """A run that exported its model."""
    ended = home.start(home.write_job(NAME, **SPEC)).end()
    assert ended.code == 0, ended.said
    item: dict[str, Any] = ended.item
    return item


def weights(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of an export, by file and name."""
    files = sorted(folder.rglob("*.safetensors"))
    assert files
    return {f"{file.relative_to(folder)}:{name}": value for file in files for name, value in load_file(file).items()}


def test_a_preview_shows_the_packs_of_a_step_and_a_trace_finds_their_samples(
    finished: dict[str, Any], home: PolyremeHome, tmp_path: Path
) -> None:
    assert finished["step"] == 3
    page = tmp_path / "step.html"
    assert home.call("data", "preview", "--job", NAME, "--step", "2", "--to", str(page)).code == 0
    assert page.read_text().count("data:image/png") > 3
    packs, sample = home.call("data", "preview", "--job", NAME, "--step", "2", "-o", "json").item["packs"], ""
    for number, pack in enumerate(packs):
        assert sum(part["tokens"] for each in pack["documents"] for part in each["parts"]) == pack["tokens"]
        assert all(part["text"].isdigit() for each in pack["documents"] for part in each["parts"][-1:])
        sample = pack["documents"][-1]["sample"]
        turns = home.call("data", "trace", sample, "--job", NAME, "-o", "json").item
        assert (2, number) in {(turn["step"], turn["pack"]) for turn in turns}
    rows = home.call("data", "mixture", "--job", NAME, "-o", "json").item
    assert [(row["fromStep"], row["toStep"], row["tokensPercent"]) for row in rows] == [(1, 3, 100.0)]
    [row] = rows
    assert row["visitsMin"] <= row["epochs"] <= row["visitsMax"] <= row["visitsMin"] + 1
    assert row["visitsCounted"]
    codes = [
        home.call("data", "mixture", "--job", "nameless").code,
        home.call("data", "preview", "--job", NAME, "--step", "4").code,
        home.call("data", "preview", "--job", "nameless", "--step", "1").code,
        home.call("data", "trace", "nobody", "--job", NAME).code,
        home.call("data", "trace", sample, "--job", NAME, "--steps", "3-2").code,
    ]
    assert codes == [NOT_FOUND, USAGE, NOT_FOUND, NOT_FOUND, USAGE]


def test_an_exported_checkpoint_is_the_runs_own_export_and_loads(
    finished: dict[str, Any], home: PolyremeHome, tmp_path: Path
) -> None:
    listed = home.call("checkpoint", "ls", NAME, "-o", "json").item
    assert [row["step"] for row in listed if row["committed"] and row["history"]] == [2, 3]
    folder = tmp_path / "model"
    done = home.call("checkpoint", "export", NAME, "--to", str(folder), "-o", "json")
    assert done.code == 0, done.said
    assert done.item == {"checkpoint": "a000001-s00000003", "step": 3, "folder": str(folder)}
    ours, its_own = weights(folder), weights(Path(finished["export"]))
    assert list(ours) == list(its_own)
    assert [name for name in ours if not torch.equal(ours[name], its_own[name])] == []

    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    written = "Which digits, left to right?"
    assert tokenizer.decode(tokenizer(written)["input_ids"]) == written
    turns = [{"role": "user", "content": written}]
    asked = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert asked == f"<|user|>{written}<|assistant|>"
    model = AutoModelForCausalLM.from_pretrained(folder / "text")
    assert sum(value.numel() for value in model.parameters()) > 0
    again = home.call("checkpoint", "export", NAME, "--to", str(folder))
    assert again.code == 0, again.said
    assert list(weights(folder)) == list(ours)
    (folder / "mine.txt").write_text("not an export's")
    refused = home.call("checkpoint", "export", NAME, "--to", str(folder))
    assert refused.code == REFUSED
    assert "folder is not empty and not an earlier export" in refused.said


def test_the_mean_of_the_last_checkpoints_is_exported(
    finished: dict[str, Any], home: PolyremeHome, tmp_path: Path
) -> None:
    assert finished["export"]
    one_by_one = [tmp_path / "2", tmp_path / "3"]
    for folder in one_by_one:
        checkpoint = f"a000001-s{int(folder.name):08}"
        done = home.call("checkpoint", "export", NAME, "--to", str(folder), "--checkpoint", checkpoint)
        assert done.code == 0, done.said
    mean = home.call("checkpoint", "average", NAME, "--last", "2", "--to", str(tmp_path / "mean"), "-o", "json")
    assert mean.code == 0, mean.said
    assert (mean.item["step"], mean.item["meanOf"]) == (3, "a000001-s00000002, a000001-s00000003")
    second, third = map(weights, one_by_one)
    for name, value in weights(tmp_path / "mean").items():
        assert torch.equal(value, (second[name] + third[name]) / 2), name
    few = home.call("checkpoint", "average", NAME, "--last", "4", "--to", str(tmp_path / "none"))
    assert few.code == NOT_FOUND
    assert "has 2 on its committed history, 4 were asked for; spec.checkpoint.keep" in few.said


def test_a_run_continues_from_an_export_with_its_tokenizer(finished: dict[str, Any], home: PolyremeHome) -> None:
    """Other data, whose own words would be other tokens; the same weights say the same of the same text."""
    export = f"file://{finished['export']}"
    data = {"sources": [{"name": "own", "dataset": "sample/digits-2"}], "tokenizer": {"location": export}}
    model = {"preset": "kimi-vl-nano", "weights": {"location": export}}
    spec = small("sample/digits-2", steps=1, data=data, model=model, export={"format": "HuggingFace"})
    ended = home.start(home.write_job("continued", **spec)).end()
    assert ended.code == 0, ended.said
    files = ("tokenizer.json", "polyreme-template.json", "text/tokenizer.json", "text/polyreme-template.json")
    both = [[(Path(item["export"]) / name).read_bytes() for name in files] for item in (finished, ended.item)]
    assert both[0] == both[1]


@pytest.mark.usefixtures("finished")
def test_a_run_is_listed_shown_and_its_logs_are_printed(home: PolyremeHome) -> None:
    rows = {row["name"]: row for row in home.call("runs", "ls", "-o", "json").item}
    assert (rows[NAME]["state"], rows[NAME]["step"]) == ("Succeeded", 3)
    assert NAME in home.call("runs", "ls").output
    shown = home.call("runs", "show", NAME)
    assert shown.code == 0
    assert "a000001-s00000003" in shown.output
    assert home.call("runs", "show", NAME, "-o", "json").item["attempts"][0]["steps"] == 3
    logs = home.call("runs", "logs", NAME, "--rank", "0")
    assert logs.code == 0
    assert "rank-0.a1.log" in logs.output
    assert home.call("runs", "logs", NAME, "--rank", "7").code == NOT_FOUND
    near = home.call("runs", "show", "exportet")
    assert near.code == NOT_FOUND
    assert f"did you mean {NAME!r}" in near.said
    wrong = home.call("checkpoint", "export", NAME, "--to", "/nowhere", "--checkpoint", "a000001-s00000009")
    assert wrong.code == NOT_FOUND
    assert "a000001-s00000003" in wrong.said
