"""Compatibility of a folder's weights with a model: pure rules over the catalogue, checked before any weight is read.

Two schemes of names are known. Kimi-VL's are ours, except for the experts, which we stack (``export/names.py``). Those
of DeepSeek-V3 are the same without ``language_model.``, and hold only the decoder: tower and projector stay as drawn.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from polyreme_api.batch import TokenIds
from polyreme_api.errors import InvalidConfigError
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.export.config import text_config, vision_config, yarn_config
from polyreme_trainer.export.names import TEXT_PREFIX, text_part, to_checkpoint
from polyreme_trainer.model.initialise import outline
from polyreme_trainer.weights import FIELD
from polyreme_trainer.weights.catalogue import Catalogue, listed
from polyreme_trainer.weights.fp8_blocks import DTYPE as FP8

DTYPES = ("F32", "BF16", "F16")
"""Types that are read; each is converted to the model's own."""
CLASSES = ("kimi_vl", "deepseek_v3", "kimi_k2")
"""Values of ``model_type`` of the models that can be read."""
_SCALES = ("_scale_inv", "_scale")
"""Suffixes of the names of scales: of DeepSeek's blocks in FP8, and of compressed-tensors."""
_DERIVED = ".rotary_emb.inv_freq"
"""Suffix of the names of tables that older software stored; they follow from ``rope_theta``."""
_TEXT_STARTS = ("model.", "lm_head.")
_PLAIN = {
    "architectures", "model_type", "torch_dtype", "dtype", "eos_token_id", "pad_token_id", "max_position_embeddings",
    "initializer_range", "num_nextn_predict_layers", "rope_theta", "rope_parameters", "rope_scaling",
    "rope_interleave",
}  # fmt: skip
"""Fields of ``config.json`` that determine no weight, or are compared separately."""
_OVERRIDES = {
    "vocab_size": "decoder.vocabulary",
    "hidden_size": "decoder.width",
    "num_hidden_layers": "decoder.layers",
    "first_k_dense_replace": "decoder.dense_layers",
    "intermediate_size": "decoder.dense_ffn_width",
    "moe_intermediate_size": "decoder.expert_ffn_width",
    "n_routed_experts": "decoder.experts",
    "num_experts_per_tok": "decoder.experts_per_token",
    "n_shared_experts": "decoder.shared_experts",
    "num_attention_heads": "decoder.heads",
    "q_lora_rank": "decoder.q_rank",
    "kv_lora_rank": "decoder.kv_rank",
    "qk_nope_head_dim": "decoder.nope_dim",
    "qk_rope_head_dim": "decoder.rope_dim",
    "v_head_dim": "decoder.value_dim",
    "rope_theta": "decoder.rope_theta",
    "rms_norm_eps": "decoder.norm_eps",
    "routed_scaling_factor": "decoder.routed_scaling",
    "n_group": "decoder.expert_groups",
    "topk_group": "decoder.groups_per_token",
    "rope_scaling.factor": "decoder.yarn_factor",
    "rope_scaling.original_max_position_embeddings": "decoder.yarn_positions",
    "rope_scaling.beta_fast": "decoder.yarn_beta_fast",
    "rope_scaling.beta_slow": "decoder.yarn_beta_slow",
    "rope_scaling.mscale": "decoder.yarn_mscale",
    "rope_scaling.mscale_all_dim": "decoder.yarn_mscale_all_dim",
}
"""The size of ours that a field of the decoder's configuration sets."""


_YARN_ABSENT = {"beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 0.0}
"""Readers' defaults for what a configuration with YaRN does not name."""
_YARN_UNKNOWN = {"attention_factor": None, "truncate": True}
"""YaRN fields of a configuration that have no counterpart in our shape, with the value that changes nothing."""


class Names(enum.Enum):
    """Schemes of names; the value says who uses them."""

    KIMI_VL = "Kimi-VL"
    """The whole model."""
    DEEPSEEK_V3 = "DeepSeek-V3"
    """Only the decoder."""

    def of(self, name: str) -> str:
        """Translate a name of the whole model to this scheme."""
        return name if self is Names.KIMI_VL else name.removeprefix(TEXT_PREFIX)


def check_fit(catalogue: Catalogue, shape: ModelShape) -> Names:
    """Refuse weights of another model.

    Returns:
        Their scheme of names.

    Raises:
        InvalidConfigError: Naming the first rule that is broken, the value seen, and the field to change.
    """
    _check_class(catalogue)
    names = scheme_of(catalogue)
    _check_types(catalogue)
    if catalogue.config is not None:
        check_config(catalogue.config, names, shape)
    wanted = wanted_tensors(shape, names)
    _check_vocabulary(catalogue, names, shape)
    predictors = _predictors(catalogue.config, names, shape)
    found = {name for name in catalogue.tensors if not name.endswith(_DERIVED) and not name.startswith(predictors)}
    if missing := sorted(wanted.keys() - found):
        raise InvalidConfigError(
            f"weights lack tensors: {listed(missing)}, expected all {len(wanted)} of model {shape.name} under "
            f"{names.value}'s names in {catalogue.folder}",
            field=f"{FIELD} or spec.model.preset",
        )
    if extra := sorted(found - wanted.keys()):
        raise InvalidConfigError(
            f"weights have tensors that the model lacks: {listed(extra)}, expected only the {len(wanted)} of "
            f"model {shape.name} under {names.value}'s names",
            field=f"{FIELD} or spec.model.preset",
        )
    for name, tensor in wanted.items():
        shape_found = catalogue.tensors[name].shape
        if shape_found != tuple(tensor.shape):
            raise InvalidConfigError(
                f"weight has another shape: {name} is {shape_found}, expected {tuple(tensor.shape)} in model "
                f"{shape.name}",
                field="spec.model.overrides",
            )
    return names


def decoder_fields(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the sizes that a decoder's configuration sets, by our names."""
    rope = {**(text.get("rope_parameters") or {}), **(text.get("rope_scaling") or {})}
    scaled = rope.get("rope_type", rope.get("type", "default")) != "default"
    found: dict[str, Any] = {}
    for theirs, ours in _OVERRIDES.items():
        group, _, field = theirs.rpartition(".")
        value = rope.get(field) if group else text.get(field, rope.get(field))
        if value is not None and (scaled or not group):
            found[ours.removeprefix("decoder.")] = value
    return found


def _check_class(catalogue: Catalogue) -> None:
    """Refuse a model of another class in one sentence: no preset and no override makes it fit."""
    whole = catalogue.config or {}
    text = whole.get("text_config")
    for part in (whole, text if isinstance(text, Mapping) else {}):
        kind = part.get("model_type")
        if kind is not None and kind not in CLASSES:
            classes = [str(each) for each in part.get("architectures") or ()]
            named = f" ({', '.join(classes)})" if classes else ""
            raise InvalidConfigError(
                f"weights are of another class of models: their config.json says model_type is {kind!r}{named}, "
                f"expected one of {', '.join(CLASSES)}, whose layers polyreme has; no preset and no override "
                "makes them fit",
                field=FIELD,
            )


def _check_types(catalogue: Catalogue) -> None:
    """Refuse weights that are quantised, but for FP8 with a scale for each block and 4 bits as we export them."""
    other = sorted(
        name for name, stored in catalogue.tensors.items() if stored.dtype not in DTYPES and not stored.scales
    )
    if not other:
        return
    first = other[0]
    scales = [name for name in catalogue.tensors if name.endswith(_SCALES)]
    by = f" by scales such as {min(scales)}" if scales else ""
    raise InvalidConfigError(
        f"weight has another type: {first} is {catalogue.tensors[first].dtype}, expected one of {', '.join(DTYPES)}, "
        f"{FP8} with a float32 scale for each block, or 4 bits in symmetric groups; {len(other)} of "
        f"{len(catalogue.tensors)} tensors are quantised{by}: convert them to bfloat16 first",
        field=FIELD,
    )


def scheme_of(catalogue: Catalogue) -> Names:
    """Recognise the scheme by the names.

    Raises:
        InvalidConfigError: If they are of neither.
    """
    if any(name.startswith(TEXT_PREFIX) for name in catalogue.tensors):
        return Names.KIMI_VL
    if any(name.startswith(_TEXT_STARTS) for name in catalogue.tensors):
        return Names.DEEPSEEK_V3
    raise InvalidConfigError(
        f"weights' names are not known: {listed(sorted(catalogue.tensors)) or 'none'} in {catalogue.folder}, expected "
        f"Kimi-VL's ({TEXT_PREFIX}model...) or DeepSeek-V3's (model..., lm_head.weight)",
        field=FIELD,
    )


def wanted_tensors(shape: ModelShape, names: Names) -> dict[str, Tensor]:
    """Name every tensor of the files, experts one by one; the tensors are on the meta device."""
    whole = outline(shape)
    return to_checkpoint(whole if names is Names.KIMI_VL else text_part(whole))


def _check_vocabulary(catalogue: Catalogue, names: Names, shape: ModelShape) -> None:
    """Refuse another vocabulary in words instead of shapes: a tokenizer of another size is the usual mismatch."""
    for name in (names.of("language_model.model.embed_tokens.weight"), names.of("language_model.lm_head.weight")):
        stored = catalogue.tensors.get(name)
        if stored is not None and stored.shape[:1] != (shape.decoder.vocabulary,):
            raise InvalidConfigError(
                f"weights have another vocabulary: {name} has {stored.shape[0] if stored.shape else 0} words, expected "
                f"the model's {shape.decoder.vocabulary}",
                field="spec.model.overrides.decoder.vocabulary",
            )


def check_config(config: Mapping[str, Any], names: Names, shape: ModelShape) -> None:
    """Compare what shapes don't show: heads, rotary positions, experts per token, epsilon.

    Raises:
        InvalidConfigError: Naming the first field that differs.
    """
    text = config.get("text_config", {}) if names is Names.KIMI_VL else config
    for field, seen, rule in _text_differences(text, shape):
        size = _OVERRIDES.get(field)
        raise _other_model(field, seen, rule, f"overrides.{size}" if size else "preset")
    vision = config.get("vision_config", {}) if names is Names.KIMI_VL else {}
    ours = {field: value for field, value in vision_config(shape.vision).items() if field not in _PLAIN}
    for field, rule in ours.items():
        if field in vision and vision[field] != rule:
            raise _other_model(f"vision_config.{field}", vision[field], rule, "overrides.vision")


def _predictors(config: Mapping[str, Any] | None, names: Names, shape: ModelShape) -> tuple[str, ...]:
    """Return prefixes of the names of layers that predict further tokens: stored after the others, and not read."""
    text = (config or {}).get("text_config", {}) if names is Names.KIMI_VL else config or {}
    first = shape.decoder.layers
    numbers = range(first, first + (text.get("num_nextn_predict_layers") or 0))
    return tuple(names.of(f"{TEXT_PREFIX}model.layers.{number}.") for number in numbers)


def _other_model(field: str, seen: object, rule: object, change: str) -> InvalidConfigError:
    return InvalidConfigError(
        f"weights are of another model: their config.json says {field} is {seen!r}, expected {rule!r} as in this model",
        field=f"spec.model.{change}",
    )


def _text_differences(text: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, object, object]]:
    """Yield fields of the decoder's configuration that differ, with the value seen and ours."""
    ours = text_config(shape.decoder, tokens=TokenIds(media=0, end=0, pad=0))
    for field, rule in ours.items():
        if field not in _PLAIN and field in text and text[field] != rule:
            yield field, text[field], rule
    # Newer configurations keep the rotary base and its scaling in one place, older ones in two; some have both.
    for rotary in (text, text.get("rope_parameters") or {}, text.get("rope_scaling") or {}):
        theta = rotary.get("rope_theta", shape.decoder.rope_theta)
        if theta != shape.decoder.rope_theta:
            yield "rope_theta", theta, shape.decoder.rope_theta
    yield from _yarn_differences(text, shape)
    if text.get("rope_interleave", True) is not True:
        yield "rope_interleave", text["rope_interleave"], True


def _yarn_differences(text: Mapping[str, Any], shape: ModelShape) -> Iterator[tuple[str, object, object]]:
    """Yield what differs in the scaling of the rotary positions."""
    yarn = yarn_config(shape.decoder)
    ours = "default" if yarn is None else "yarn"
    said = [rotary for key in ("rope_parameters", "rope_scaling") if (rotary := text.get(key))]
    for rotary in said or [{}]:
        kind = rotary.get("rope_type", rotary.get("type", "default"))
        if kind == "yarn" and yarn is None:
            yield "rope_scaling.factor", rotary.get("factor"), shape.decoder.yarn_factor
        elif kind != ours:
            yield "rope_scaling", kind, ours
        if kind != ours:
            continue
        for name, rule in (yarn or {}).items():
            if (seen := rotary.get(name, _YARN_ABSENT.get(name))) != rule:
                yield f"rope_scaling.{name}", seen, rule
        for name, rule in _YARN_UNKNOWN.items() if yarn else ():
            if (seen := rotary.get(name, rule)) != rule:
                yield f"rope_scaling.{name}", seen, rule
