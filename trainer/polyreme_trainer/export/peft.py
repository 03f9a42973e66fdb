"""Adapters in PEFT's form: ``adapter_config.json`` and ``adapter_model.safetensors``, for the export's text part.

PEFT knows the decoder as transformers builds it (DeepSeek-V3). Attention is targeted by its modules' names. Dense and
shared feed-forwards are targeted by their parameters: of such models PEFT takes the modules' names ``gate_proj``,
``up_proj`` and ``down_proj`` for those of the experts. So are the experts' stacks; PEFT wraps a module once for each of
its parameters, and names an inner wrapper ``base_layer``: that of ``gate_up_proj``.

Legend: E experts, R rank, I inputs, O outputs.
"""

from __future__ import annotations

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from safetensors.torch import save
from torch import Tensor

from polyreme_planner.adapters import Adapters, Target
from polyreme_trainer.export.huggingface import written_whole
from polyreme_trainer.export.names import TEXT_PREFIX
from polyreme_trainer.model.adapters import A

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
_PREFIX = "base_model.model."
_ATTENTION = ("q_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
_STACKS = {".experts.gate_up_proj_": ".experts.base_layer.", ".experts.down_proj_": ".experts."}


def export_adapters(
    tensors: Mapping[str, Tensor], adapters: Adapters, directory: pathlib.Path, *, base: str = ""
) -> None:
    """Write adapters; an older export at ``directory`` is replaced.

    Args:
        tensors: A and B by their global names, of the whole model.
        adapters: Their description.
        directory: Where the export shall be; its parent is created.
        base: Where the weights are that they were trained beside; empty if these were drawn.

    Raises:
        OSError: If the disk refuses; the older export is kept.
    """
    named = dict(_named(name, tensor.detach().cpu()) for name, tensor in tensors.items())
    with written_whole(directory) as partial:
        (partial / WEIGHTS_FILE).write_bytes(save(named, metadata={"format": "pt"}))
        config = json.dumps(config_of(adapters, base=base, names=list(tensors)), indent=2, sort_keys=True)
        (partial / CONFIG_FILE).write_text(config + "\n", encoding="utf-8")


def config_of(adapters: Adapters, *, base: str, names: list[str]) -> dict[str, Any]:
    """Describe adapters of these names as PEFT does."""
    modules = {name.split(".")[-2] for name in names if ".self_attn." in name}
    dense = [f"{of}.{name}.weight" for of in ("mlp", "shared_experts") for name in _FEED_FORWARD]
    stacks = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    parameters = (dense if Target.DENSE in adapters.targets else []) + (
        stacks if Target.EXPERTS in adapters.targets else []
    )
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": adapters.rank,
        "lora_alpha": int(adapters.alpha) if adapters.alpha.is_integer() else adapters.alpha,
        "lora_dropout": 0.0,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "init_lora_weights": True,
        "target_modules": [name for name in _ATTENTION if name in modules] or None,
        "target_parameters": parameters or None,
    }


def _named(name: str, tensor: Tensor) -> tuple[str, Tensor]:
    """Name a tensor as PEFT does; the experts' are one matrix: A by expert and rank (ER, I), B by rank and expert."""
    text = name.removeprefix(TEXT_PREFIX)
    for ours, theirs in _STACKS.items():
        if ours in text:
            text = text.replace(ours, theirs)
            tensor = tensor.flatten(0, 1) if name.endswith(A) else tensor.permute(1, 2, 0).flatten(1)
    return f"{_PREFIX}{text}.weight", tensor.contiguous()
