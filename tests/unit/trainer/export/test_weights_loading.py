"""Weights of either scheme of names fill any slice of a model bit by bit, in bounded memory, or are refused."""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import json
import pathlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_planner.shapes import (
    DEEPSEEK_V3,
    KIMI_K2,
    KIMI_VL_NANO,
    MOONLIGHT_16B_A3B,
    NO_VISION,
    PRESETS,
    ModelShape,
    model_shape,
)
from polyreme_trainer.export.config import model_config, text_config
from polyreme_trainer.export.huggingface import CONFIG_FILE, INDEX_FILE
from polyreme_trainer.export.names import to_checkpoint
from polyreme_trainer.model.initialise import STACKED, build_model
from polyreme_trainer.model.moe import LocalDispatcher
from polyreme_trainer.model.section import sections
from polyreme_trainer.model.sharding import cut_of, slice_of
from polyreme_trainer.model.tensor import Alone
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.weights import FIELD, load
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import Names, check_config, check_fit, wanted_tensors
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.slices import Place, Rows
from tests.unit.trainer.export.reading import TOKENS, assert_equal, read_back

EXPERT = "language_model.model.layers.1.mlp.experts.3.up_proj.weight"
EMBEDDING = "language_model.model.embed_tokens.weight"
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
OVERRIDES = "spec.model.overrides"
PARTS = {"whole": ((0, 3),), "three stages": ((0, 0), (0, 2), (2, 3))}


class Ranks(Alone):
    """A place among tensor-parallel ranks that never speak: enough to build a model."""

    def __init__(self, place: int, parts: int) -> None:
        self.place, self.parts, self.row_parts = place, parts, parts


def test_the_order_of_files_and_of_tensors_in_them_does_not_matter(model: KimiVL, exported: pathlib.Path) -> None:
    tensors = [(name, tensor.clone()) for name, tensor in reversed(to_checkpoint(model.state_dict()).items())]
    for file in exported.glob("*.safetensors"):
        file.unlink()
    files = {"a.safetensors": dict(tensors[1::2]), "b.safetensors": dict(tensors[::2])}
    for name, held in files.items():
        save_file(held, exported / name)
    _write_index(exported, {name: file for file, held in files.items() for name in held})
    assert_equal(model.state_dict(), read_back(exported))


def test_one_file_needs_no_index_and_no_configuration(model: KimiVL, tmp_path: pathlib.Path) -> None:
    tensors = {name: tensor.clone() for name, tensor in to_checkpoint(model.state_dict()).items()}
    tensors["language_model.model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(model.state_dict(), read_back(tmp_path))


def test_deepseeks_names_fill_the_decoder_and_leave_tower_and_projector_as_drawn(
    model: KimiVL, exported: pathlib.Path
) -> None:
    drawn = build_model(KIMI_VL_NANO, seed=99, media_token=TOKENS.media).state_dict()
    text = {name: tensor for name, tensor in model.state_dict().items() if name.startswith("language_model.")}
    assert_equal({**drawn, **text}, read_back(exported / "text"))


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_weights_of_another_type_are_turned_into_the_models(
    model: KimiVL, tmp_path: pathlib.Path, stored: torch.dtype, wanted: torch.dtype
) -> None:
    tensors = {name: tensor.to(stored) for name, tensor in to_checkpoint(model.state_dict()).items()}
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, tmp_path / "model.safetensors")
    expected = {
        name: tensor.to(stored).to(torch.float32 if "correction" in name else wanted)
        for name, tensor in model.state_dict().items()
    }
    assert_equal(expected, read_back(tmp_path, dtype=wanted))


@pytest.mark.parametrize("split", PARTS.values(), ids=PARTS)
@pytest.mark.parametrize("ep", [1, 4])
@pytest.mark.parametrize("tp", [1, 2])
def test_every_slice_of_every_layout_gets_its_own_part_and_no_other(
    model: KimiVL, exported: pathlib.Path, tp: int, ep: int, split: tuple[tuple[int, int], ...]
) -> None:
    whole, found = model.state_dict(), 0
    catalogue = read_catalogue(exported)
    names = check_fit(catalogue, KIMI_VL_NANO)
    for section, tensor, place in itertools.product(sections(KIMI_VL_NANO, split), range(tp), range(ep)):
        experts = range(place * 8 // ep, (place + 1) * 8 // ep)
        held = build_model(
            KIMI_VL_NANO,
            seed=99,
            media_token=TOKENS.media,
            section=section,
            experts_local=experts,
            dispatcher=LocalDispatcher(),
            ranks=Ranks(tensor, tp),
        ).state_dict()
        filled = load_weights(
            Rows.whole(held), catalogue, names, Place(experts=experts, tensor=tensor, tensor_parts=tp)
        )
        assert filled == sum(own.numel() for own in held.values())
        found += len(held)
        for name, own in held.items():
            assert torch.equal(own, _part(name, whole[name], experts, tensor, tp)), name
    assert found == len(whole) * tp * ep


@pytest.mark.parametrize("tp", [1, 2])
def test_rows_of_a_slice_get_their_own_part_and_no_other(model: KimiVL, exported: pathlib.Path, tp: int) -> None:
    """Dealt to three ranks, rows are uneven, and some ranks have none."""
    whole, sharers = model.state_dict(), 3
    catalogue = read_catalogue(exported)
    names = check_fit(catalogue, KIMI_VL_NANO)
    experts = range(4, 8)
    for tensor in range(tp):
        place = Place(experts=experts, tensor=tensor, tensor_parts=tp)
        slices = {name: _part(name, own, experts, tensor, tp) for name, own in whole.items()}
        for sharer in range(sharers):
            held = {name: _rows(own, sharer, sharers) for name, own in slices.items()}
            filled = load_weights(held, catalogue, names, place)
            assert filled == sum(rows.own.numel() for rows in held.values())
            for name, rows in held.items():
                expected = slices[name][rows.first : rows.first + rows.own.shape[0]]
                assert torch.equal(rows.own, expected), name


def _rows(whole: torch.Tensor, sharer: int, sharers: int) -> Rows:
    run = -(-whole.shape[0] // sharers)
    mine = whole[sharer * run : (sharer + 1) * run]
    first = min(sharer * run, whole.shape[0])
    return Rows(own=torch.full_like(mine, torch.nan), first=first, rows=whole.shape[0])


def test_of_the_files_no_more_is_in_memory_than_a_window_or_one_tensor(
    tmp_path: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The largest this process ever was, as the kernel reports: a quarter of 96 MiB of experts, in 8 MiB."""
    shape = model_shape(
        "kimi-vl-nano", {"decoder": {"width": 256, "experts": 32, "expert_ffn_width": 1024, "layers": 3}}
    )
    tensors = {
        name: torch.zeros(tensor.shape, dtype=torch.bfloat16).fill_(number)
        for number, (name, tensor) in enumerate(wanted_tensors(shape, Names.DEEPSEEK_V3).items())
    }
    save_file(tensors, tmp_path / "model.safetensors")
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    last = float(len(tensors) - 1)
    del tensors
    assert file_bytes > 96 << 20
    place = Place(experts=range(8, 16))
    held = build_model(
        dataclasses.replace(shape, vision=NO_VISION),
        seed=0,
        media_token=1,
        experts_local=place.experts,
        dispatcher=LocalDispatcher(),
    ).state_dict()
    catalogue = read_catalogue(tmp_path)
    names = check_fit(catalogue, shape)
    monkeypatch.setattr(load, "MAPPED_BYTES_MAX", 1 << 20)
    before = _peak_bytes(reset=True)
    load_weights(Rows.whole(held), catalogue, names, place)
    assert _peak_bytes() - before < 8 << 20
    assert held["language_model.lm_head.weight"].float().unique().tolist() == [last]


def _peak_bytes(*, reset: bool = False) -> int:
    """Largest resident set of this process since the last reset."""
    if reset:
        ctypes.CDLL(None).malloc_trim(0)  # what lies free in the heap would hide what is allocated next
        pathlib.Path("/proc/self/clear_refs").write_text("5")
    status = dict(line.split(":", 1) for line in pathlib.Path("/proc/self/status").read_text().splitlines())
    return int(status["VmHWM"].split()[0]) << 10


def test_the_released_sizes_are_named_in_full() -> None:
    """As many as the released checkpoints hold, without tables that follow from other numbers."""
    assert len(wanted_tensors(PRESETS["kimi-vl-a3b"], Names.KIMI_VL)) == 5652
    moonlight = wanted_tensors(MOONLIGHT_16B_A3B, Names.DEEPSEEK_V3)
    # A layer's norms and attention; the dense one; experts, router and shared ones; the ends of the decoder.
    assert len(moonlight) == 27 * 7 + 3 + 26 * (64 * 3 + 2 + 3) + 3
    assert moonlight["model.layers.26.mlp.experts.63.down_proj.weight"].shape == (2048, 1408)


Damage = Callable[[pathlib.Path], object]


def _change(name: str, change: Callable[[Tensor], Tensor]) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        file = folder / json.loads((folder / INDEX_FILE).read_text())["weight_map"][name]
        tensors = load_file(file)
        tensors[name] = change(tensors[name])
        save_file(tensors, file)

    return damage


def _spoil(tensor: Tensor) -> Tensor:
    tensor[0, :3] = torch.tensor([float("nan"), float("inf"), -float("inf")])
    tensor[-1, -1] = float("nan")
    return tensor


def _configure(change: Callable[[dict[str, Any]], None]) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        config = json.loads((folder / CONFIG_FILE).read_text())
        change(config)
        (folder / CONFIG_FILE).write_text(json.dumps(config))

    return damage


def _text(**fields: Any) -> Damage:
    return _configure(lambda config: config["text_config"].update(fields))


def _without_config(damage: Damage) -> Damage:
    def both(folder: pathlib.Path) -> None:
        (folder / CONFIG_FILE).unlink()
        damage(folder)

    return both


def _write_index(folder: pathlib.Path, weight_map: dict[str, str]) -> None:
    (folder / INDEX_FILE).write_text(json.dumps({"weight_map": weight_map}))


def _index(change: Callable[[dict[str, str]], None]) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        change(weight_map)
        _write_index(folder, weight_map)

    return damage


def _drop(*ends: str) -> Damage:
    """Take tensors out of the files and the index."""

    def damage(folder: pathlib.Path) -> None:
        weight_map = json.loads((folder / INDEX_FILE).read_text())["weight_map"]
        for file in set(weight_map.values()):
            save_file({n: t for n, t in load_file(folder / file).items() if not n.endswith(ends)}, folder / file)
        _write_index(folder, {name: file for name, file in weight_map.items() if not name.endswith(ends)})

    return damage


def _add(**tensors: Tensor) -> Damage:
    def damage(folder: pathlib.Path) -> None:
        save_file(tensors, folder / "more.safetensors")
        _index(lambda weight_map: weight_map.update(dict.fromkeys(tensors, "more.safetensors")))(folder)

    return damage


def _rename(folder: pathlib.Path) -> None:
    save_file({"transformer.wte.weight": torch.zeros(1)}, folder / "other.safetensors")
    _write_index(folder, {"transformer.wte.weight": "other.safetensors"})


INDEX_WORDS = f"that {INDEX_FILE} names"
FIRST = "model-00001-of-00008.safetensors"
REFUSALS: dict[str, tuple[Damage, list[str]]] = {
    "NaN and Inf": (
        _change(EXPERT, _spoil),
        ["weights are not finite: ", f"{EXPERT} has 2 NaN and 2 Inf among 6144 values, expected none; change {FIELD}"],
    ),
    "two experts lack a part": (
        _drop("experts.3.up_proj.weight"),
        [
            f"weights lack tensors: {EXPERT}, {EXPERT.replace('.1.', '.2.')}, expected all 120 of model kimi-vl-nano",
            f"under Kimi-VL's names in /; change {FIELD} or spec.model.preset",
        ],
    ),
    "much is missing": (
        _drop("layernorm.weight"),
        ["layers.0.input_layernorm.weight, ", " and 7 more, expected all 120"],
    ),
    "some are too many": (
        _add(**{f"language_model.model.layers.{layer}.eh_proj.weight": torch.zeros(1) for layer in range(5)}),
        [
            "weights have tensors that the model lacks: language_model.model.layers.0.eh_proj.weight, ",
            "layers.2.eh_proj.weight and 2 more, expected only the 120 of model kimi-vl-nano",
        ],
    ),
    "another shape": (
        _change(EXPERT, lambda tensor: tensor.t().contiguous()),
        [f"weight has another shape: {EXPERT} is (96, 64), expected (64, 96) in model", "change spec.model.overrides"],
    ),
    "another vocabulary": (
        _without_config(_change(EMBEDDING, lambda tensor: tensor[:500].contiguous())),
        [
            (
                f"another vocabulary: {EMBEDDING} has 500 words, expected the model's 512; "
                f"change {OVERRIDES}.decoder.vocabulary"
            )
        ],
    ),
    "another vocabulary, told": (
        _text(vocab_size=163_840),
        ["config.json says vocab_size is 163840, expected 512 as in this model; ", f"{OVERRIDES}.decoder.vocabulary"],
    ),
    "another type": (
        _change(EXPERT, lambda tensor: tensor.to(torch.float8_e4m3fn)),
        [
            f"weight has another type: {EXPERT} is F8_E4M3, expected one of F32, BF16, F16, F8_E4M3 with a ",
            f"change {FIELD}",
        ],
    ),
    "FP8 by other scales": (
        lambda folder: (
            _change(EXPERT, lambda tensor: tensor.to(torch.float8_e4m3fn))(folder),
            _add(**{f"{EXPERT}_scale_inv": torch.ones(2, 1)})(folder),
        ),
        [
            f"weight has another type: {EXPERT} is F8_E4M3, expected one of F32, BF16, F16, F8_E4M3 with a float32 ",
            "scale for each block, or 4 bits in symmetric groups; 1 of 121 tensors are ",
            f"quantised by scales such as {EXPERT}_scale_inv: convert them to bfloat16 first; change {FIELD}",
        ],
    ),
    "another class of models": (
        _configure(lambda config: config.update(model_type="qwen3_moe", architectures=["Qwen3MoeForCausalLM"])),
        [
            "weights are of another class of models: their config.json says model_type is 'qwen3_moe' ",
            "(Qwen3MoeForCausalLM), expected one of kimi_vl, deepseek_v3, kimi_k2, ",
            f"no preset and no override makes them fit; change {FIELD}",
        ],
    ),
    "a decoder of another class": (_text(model_type="mixtral"), ["says model_type is 'mixtral'", f"change {FIELD}"]),
    "a file is missing": (
        lambda folder: (folder / FIRST).unlink(),
        [f"weights lack files: {FIRST} of 8 {INDEX_WORDS}, expected all of them in /; copy them there; change {FIELD}"],
    ),
    "a file is cut short": (
        lambda folder: (folder / FIRST).write_bytes((folder / FIRST).read_bytes()[:-1]),
        [
            f"weights file can't be read: /{FIRST} has 3",
            " bytes, expected a whole safetensors file (",
            f"change {FIELD}",
        ],
    ),
    "a file is empty": (
        lambda folder: (folder / FIRST).write_bytes(b""),
        [f"weights file can't be read: /{FIRST} has 0 bytes, expected a whole safetensors file ("],
    ),
    "the index names what no file holds": (
        _index(lambda weight_map: weight_map.update(absent=weight_map[EXPERT])),
        [f"weights lack tensors {INDEX_WORDS}: absent, expected each in the file that it names (model-0000"],
    ),
    "the index leaves the folder": (
        _index(lambda weight_map: weight_map.update(absent="../model.safetensors")),
        [f"index is damaged: /{INDEX_FILE} names ../model.safetensors, expected 1 to 4096 plain names"],
    ),
    "the index is no JSON": (
        lambda folder: (folder / INDEX_FILE).write_text("{"),
        [f"weights' index is damaged: /{INDEX_FILE}, expected JSON with a weight_map"],
    ),
    "two files hold the same": (
        _add(**{EXPERT: torch.zeros(1)}),
        [f"weights name a tensor twice: {EXPERT} lies in model-0000", " and in more.safetensors, expected once"],
    ),
    "a configuration that is no JSON": (
        lambda folder: (folder / CONFIG_FILE).write_text("["),
        [f"weights' configuration is damaged: /{CONFIG_FILE}, expected JSON"],
    ),
    "heads that shapes don't show": (
        _text(num_attention_heads=8, qk_nope_head_dim=8),
        ["config.json says num_attention_heads is 8, expected 4 ", f"change {OVERRIDES}.decoder.heads"],
    ),
    "another rotary base": (
        _text(rope_theta=50_000),
        ["rope_theta is 50000, expected 10000.0 as", f"change {OVERRIDES}.decoder.rope_theta"],
    ),
    "a stretched rotary": (
        _text(rope_scaling={"type": "yarn", "factor": 40}),
        ["rope_scaling.factor is 40, expected 1.0 as", f"change {OVERRIDES}.decoder.yarn_factor"],
    ),
    "a rotary stretched in another way": (
        _text(rope_scaling={"type": "linear", "factor": 2}),
        ["rope_scaling is 'linear', expected 'default' as", "change spec.model.preset"],
    ),
    "groups of experts": (
        _text(n_group=4),
        ["n_group is 4, expected 1 as", f"change {OVERRIDES}.decoder.expert_groups"],
    ),
    "another epsilon": (_text(rms_norm_eps=1e-6), ["rms_norm_eps is 1e-06, expected 1e-05 as"]),
    "another router": (_text(scoring_func="softmax"), ["scoring_func is 'softmax', expected 'sigmoid' as"]),
    "another tower": (
        _configure(lambda config: config["vision_config"].update(num_attention_heads=2)),
        ["vision_config.num_attention_heads is 2, expected 4 as", f"change {OVERRIDES}.vision"],
    ),
    "names of another kind": (
        _rename,
        ["weights' names are not known: transformer.wte.weight in /, expected Kimi-VL's (", " or DeepSeek-V3's ("],
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_what_does_not_fit_is_refused_in_one_sentence(exported: pathlib.Path, case: str) -> None:
    damage, words = REFUSALS[case]
    damage(exported)
    with pytest.raises(NotFoundError if case == "a file is missing" else InvalidConfigError) as refused:
        read_back(exported)
    told = str(refused.value).replace(f"{exported}/", "/").replace(str(exported), "/")
    assert all(word in told for word in words), refused.value
    assert refused.value.field


def test_no_folder_and_a_folder_without_weights_are_not_found(tmp_path: pathlib.Path) -> None:
    with pytest.raises(
        NotFoundError, match=r"no weights: \S+absent is not a folder; change spec\.model\.weights\.location"
    ):
        read_catalogue(tmp_path / "absent")
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(NotFoundError, match=r"has neither model\.safetensors\.index\.json nor model\.safetensors"):
        read_catalogue(tmp_path)


def test_moonlights_configuration_does_not_fit_kimi_vls_decoder(exported: pathlib.Path) -> None:
    """The two have the same shapes, and another rotary base: nothing but the configuration tells them apart."""
    folder = exported / "text"
    shape = dataclasses.replace(
        KIMI_VL_NANO, decoder=dataclasses.replace(KIMI_VL_NANO.decoder, rope_theta=MOONLIGHT_16B_A3B.decoder.rope_theta)
    )
    with pytest.raises(InvalidConfigError, match=r"rope_theta is 10000\.0, expected 50000\.0"):
        check_fit(read_catalogue(folder), shape)


@pytest.mark.parametrize("shape", [DEEPSEEK_V3, KIMI_K2], ids=lambda shape: str(shape.name))
def test_a_stretched_rotary_fits_by_each_of_its_numbers(tmp_path: pathlib.Path, shape: ModelShape) -> None:
    """As released: ``rope_scaling`` alone, and integers where we write decimals."""
    numbers = {"beta_fast": 32, "beta_slow": 1, "factor": 40, "mscale": 1, "mscale_all_dim": 1, "type": "yarn"}
    if shape is KIMI_K2:
        numbers |= {"beta_fast": 1, "factor": 32}
    numbers["original_max_position_embeddings"] = 4096

    def check(**changed: object) -> None:
        config = text_config(shape.decoder) | {"rope_scaling": numbers | changed}
        del config["rope_parameters"]
        check_config(config, Names.DEEPSEEK_V3, shape)

    check()
    others = {"factor": 41, "original_max_position_embeddings": 4095, "beta_fast": 33, "mscale_all_dim": 0.5}
    for name, other in (others | {"beta_slow": 2, "mscale": 2, "attention_factor": 1.5, "truncate": False}).items():
        with pytest.raises(InvalidConfigError, match=rf"config\.json says rope_scaling\.{name} is {other}, expected "):
            check(**{name: other})


def test_layers_that_predict_further_tokens_are_not_read(exported: pathlib.Path) -> None:
    """DeepSeek-V3 is released with one, numbered after the others."""
    folder = exported / "text"
    _add(**{"model.layers.3.eh_proj.weight": torch.zeros(1)})(folder)
    with pytest.raises(InvalidConfigError, match=r"tensors that the model lacks: model\.layers\.3\.eh_proj\.weight"):
        check_fit(read_catalogue(folder), KIMI_VL_NANO)
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    check_fit(read_catalogue(folder), KIMI_VL_NANO)


def test_what_we_write_ourselves_is_no_other_model() -> None:
    """Every field that the check compares is in our own configurations."""
    text = text_config(KIMI_VL_NANO.decoder)
    assert model_config(KIMI_VL_NANO, tokens=TOKENS)["text_config"] | text == text | {
        "eos_token_id": TOKENS.end,
        "pad_token_id": TOKENS.pad,
    }


def _part(name: str, whole: Tensor, experts: range, tensor: int, tp: int) -> Tensor:
    if name.endswith(STACKED):
        return whole[experts.start : experts.stop]
    cut = cut_of(name)
    return whole if cut is None or tp == 1 else slice_of(whole, cut, place=tensor, parts=tp)
