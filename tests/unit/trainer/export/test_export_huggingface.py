"""An export is whole or absent, loads back equal, and generates the same text in another library."""

from __future__ import annotations

import dataclasses
import json
import pathlib
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_planner.shapes import KIMI_VL_NANO, NO_VISION, PRESETS
from polyreme_trainer.export.config import model_config
from polyreme_trainer.export.huggingface import INDEX_FILE, export_tensors
from polyreme_trainer.export.names import text_part, to_checkpoint
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.vlm import KimiVL
from tests.exports import export_model
from tests.unit.trainer.export.reading import TOKENS, assert_equal, read_back


@pytest.mark.parametrize("shard_bytes_max", [1 << 30, 100_000])
def test_what_is_exported_comes_back_equal(model: KimiVL, tmp_path: pathlib.Path, shard_bytes_max: int) -> None:
    export_model(model.state_dict(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS, shard_bytes_max=shard_bytes_max)
    assert_equal(model.state_dict(), read_back(tmp_path / "e"))
    for folder in (tmp_path / "e", tmp_path / "e" / "text"):
        files = sorted(folder.glob("*.safetensors"))
        assert (len(files) > 5) == (shard_bytes_max == 100_000)
        held = [load_file(file) for file in files]
        assert all(sum(t.nbytes for t in one.values()) <= shard_bytes_max or len(one) == 1 for one in held)
        index = json.loads((folder / INDEX_FILE).read_text())
        assert index["weight_map"] == {name: file.name for file, one in zip(files, held, strict=True) for name in one}
        assert index["metadata"]["total_size"] == sum(t.nbytes for one in held for t in one.values())
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_tensors_that_come_one_by_one_are_never_held(model: KimiVL, tmp_path: pathlib.Path) -> None:
    """Whatever is made of one, views included, is gone before the next is asked for; they come in another order."""
    expected = {name: tensor.to("meta") for name, tensor in model.state_dict().items()}
    alive: list[weakref.ref[Any]] = []

    def one_by_one() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in reversed(model.state_dict().items()):
            assert not any(storage() for storage in alive), "the one before is still held"
            made = tensor.clone()
            alive.append(weakref.ref(made))
            yield name, made
            del made

    export_tensors(expected, one_by_one(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS, shard_bytes_max=100_000)
    assert len(alive) == len(expected)
    assert_equal(model.state_dict(), read_back(tmp_path / "e"))


def test_an_export_that_lacks_a_tensor_is_none(model: KimiVL, tmp_path: pathlib.Path) -> None:
    state = model.state_dict()
    came = dict(list(state.items())[:-1])
    with pytest.raises(ValueError, match=r"export lacks 1 tensors, the first is lm_head\.weight"):
        export_tensors(state, came.items(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    assert not (tmp_path / "e").exists()
    assert not list(tmp_path.rglob(INDEX_FILE)), "the index is written last"


def test_a_tensor_of_another_type_is_refused(model: KimiVL, tmp_path: pathlib.Path) -> None:
    state = model.state_dict()
    narrow = ((name, tensor.bfloat16()) for name, tensor in state.items())
    with pytest.raises(ValueError, match=r"is torch\.bfloat16, not torch\.float32"):
        export_tensors(state, narrow, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)


def test_types_of_several_widths_lie_at_multiples_of_their_own(tmp_path: pathlib.Path) -> None:
    """Routers stay float32 in a bfloat16 model."""
    state = build_model(KIMI_VL_NANO, seed=5, media_token=1, dtype=torch.bfloat16).state_dict()
    mixed = {name: tensor.float() if name.endswith("gate.weight") else tensor for name, tensor in state.items()}
    export_model(mixed, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    (file,) = (tmp_path / "e").glob("*.safetensors")
    text = file.read_bytes()
    header = json.loads(text[8 : 8 + int.from_bytes(text[:8], "little")])
    sizes = {"F32": 4, "BF16": 2}
    header.pop("__metadata__")
    assert {of["dtype"] for of in header.values()} == set(sizes)
    assert all(of["data_offsets"][0] % sizes[of["dtype"]] == 0 for of in header.values())
    assert_equal(
        {name: tensor.to(torch.bfloat16) for name, tensor in mixed.items()}, _narrow(read_back(tmp_path / "e"))
    )


def _narrow(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to(torch.bfloat16) for name, tensor in state.items()}


def test_bfloat16_weights_come_back_as_they_were(tmp_path: pathlib.Path) -> None:
    model = build_model(KIMI_VL_NANO, seed=5, media_token=1, dtype=torch.bfloat16)
    export_model(model.state_dict(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    assert_equal(model.state_dict(), read_back(tmp_path / "e", dtype=torch.bfloat16))
    assert json.loads((tmp_path / "e" / "config.json").read_text())["torch_dtype"] == "bfloat16"


def test_names_are_those_of_the_released_checkpoints(model: KimiVL) -> None:
    names = set(to_checkpoint(model.state_dict()))
    assert names >= {
        "vision_tower.patch_embed.proj.weight",
        "vision_tower.patch_embed.pos_emb.weight",
        "vision_tower.encoder.blocks.1.norm0.weight",
        "vision_tower.encoder.blocks.1.wqkv.bias",
        "vision_tower.encoder.blocks.1.mlp.fc0.weight",
        "vision_tower.encoder.final_layernorm.bias",
        "multi_modal_projector.pre_norm.weight",
        "multi_modal_projector.linear_2.bias",
        "language_model.model.embed_tokens.weight",
        "language_model.model.layers.0.mlp.gate_proj.weight",
        "language_model.model.layers.2.self_attn.kv_a_proj_with_mqa.weight",
        "language_model.model.layers.2.self_attn.kv_a_layernorm.weight",
        "language_model.model.layers.2.mlp.gate.e_score_correction_bias",
        "language_model.model.layers.2.mlp.experts.7.down_proj.weight",
        "language_model.model.layers.2.mlp.shared_experts.up_proj.weight",
        "language_model.lm_head.weight",
    }
    assert not any("gate_up" in name for name in names)


@pytest.mark.slow
@pytest.mark.filterwarnings("default")
def test_the_text_part_loads_in_transformers_with_equal_logits(model: KimiVL, tmp_path: pathlib.Path) -> None:
    from transformers import AutoModelForCausalLM

    export_model(model.state_dict(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS, shard_bytes_max=200_000)
    loaded: Any = AutoModelForCausalLM.from_pretrained(tmp_path / "e" / "text", output_loading_info=True)
    reference, report = loaded
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(reference).__name__ == "DeepseekV3ForCausalLM"
    assert reference.config.rms_norm_eps == KIMI_VL_NANO.decoder.norm_eps
    tokens_T = torch.randint(3, 512, (40,), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        hidden_TD = model(tokens_T, torch.arange(40), [0, 40], torch.zeros(0, 588), []).hidden_TD
        ours, theirs = model.logits(hidden_TD), reference(input_ids=tokens_T.unsqueeze(0)).logits[0]
    assert (ours - theirs).abs().max() < 1e-5
    assert ours.std() > 0.1


def test_the_configuration_is_that_of_the_released_model() -> None:
    config = model_config(PRESETS["kimi-vl-a3b"], tokens=TokenIds(media=163_605, end=163_586, pad=163_838))
    text = config["text_config"]
    assert config["architectures"] == ["KimiVLForConditionalGeneration"]
    assert config["model_type"] == "kimi_vl"
    assert config["media_placeholder_token_id"] == 163_605
    assert (text["rms_norm_eps"], text["rope_theta"], text["q_lora_rank"]) == (1e-5, 800_000.0, None)
    assert (text["n_routed_experts"], text["num_experts_per_tok"], text["n_shared_experts"]) == (64, 6, 2)
    assert config["vision_config"]["init_pos_emb_height"] == 64
    assert json.loads(json.dumps(config)) == config


def test_a_second_export_replaces_the_first(model: KimiVL, tmp_path: pathlib.Path) -> None:
    export_model(model.state_dict(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS, shard_bytes_max=100_000)
    other = build_model(KIMI_VL_NANO, seed=6, media_token=1).state_dict()
    export_model(other, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    assert_equal(other, read_back(tmp_path / "e"))
    assert len(list((tmp_path / "e").glob("*.safetensors"))) == 1
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_an_export_that_was_killed_leaves_the_older_one_and_does_not_hinder_the_next(
    model: KimiVL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = model.state_dict()
    export_model(state, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    other = build_model(KIMI_VL_NANO, seed=6, media_token=1).state_dict()

    def killed(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pathlib.Path, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            export_model(other, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    assert (tmp_path / ".e.partial").exists()
    assert_equal(state, read_back(tmp_path / "e"))
    export_model(other, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    assert_equal(other, read_back(tmp_path / "e"))
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_an_export_killed_between_its_renames_keeps_the_older_one_until_the_next_is_whole(
    model: KimiVL, tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = model.state_dict()
    export_model(state, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    rename = pathlib.Path.rename

    def killed_at_the_second(path: pathlib.Path, target: pathlib.Path) -> pathlib.Path:
        if path.name == ".e.partial":
            raise KeyboardInterrupt
        return rename(path, target)

    other = build_model(KIMI_VL_NANO, seed=6, media_token=1).state_dict()
    for _ in range(2):
        with monkeypatch.context() as patch:
            patch.setattr(pathlib.Path, "rename", killed_at_the_second)
            with pytest.raises(KeyboardInterrupt):
                export_model(other, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
        assert_equal(state, read_back(tmp_path / ".e.replaced"))
    export_model(other, KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    assert_equal(other, read_back(tmp_path / "e"))
    assert [path.name for path in tmp_path.iterdir()] == ["e"]


def test_a_model_that_takes_no_images_is_its_text_part(tmp_path: pathlib.Path) -> None:
    shape = dataclasses.replace(KIMI_VL_NANO, vision=NO_VISION)
    state = build_model(shape, seed=5, media_token=1).state_dict()
    export_model(state, shape, tmp_path / "e", tokens=TOKENS)
    assert not (tmp_path / "e" / "text").exists()
    assert json.loads((tmp_path / "e" / "config.json").read_text())["architectures"] == ["DeepseekV3ForCausalLM"]
    assert set(json.loads((tmp_path / "e" / INDEX_FILE).read_text())["weight_map"]) == set(
        to_checkpoint(text_part(state))
    )
    assert_equal(state, read_back(tmp_path / "e", shape))


def test_the_text_part_holds_no_vision(model: KimiVL, tmp_path: pathlib.Path) -> None:
    export_model(model.state_dict(), KIMI_VL_NANO, tmp_path / "e", tokens=TOKENS)
    (file,) = (tmp_path / "e" / "text").glob("*.safetensors")
    assert all(name.startswith(("model.", "lm_head.")) for name in load_file(file))
