"""The same work by others: transformers, torchtitan. Each gets the best way to run that it offers.

Their weights are bfloat16 with float32 originals and moments, as ours are, by a step of our own over torch's fused
AdamW: neither brings one. Their gradients stay bfloat16, which spares them two bytes a parameter.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 - the name that every torch reader knows
from benchmarks.gpu.harness import Place, need_device
from torch import Tensor, nn

from polyreme_planner.shapes import ModelShape
from polyreme_trainer.export.config import text_config

RATE, BETAS, EPSILON, DECAY, NORM_MAX = 1e-4, (0.9, 0.98), 1e-8, 0.05, 1.0


class MasterAdamW:
    """AdamW over float32 originals of a model's parameters."""

    def __init__(self, model: nn.Module) -> None:
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._states = [
            (parameter.detach().float().clone(), *(torch.zeros_like(parameter, dtype=torch.float32) for _ in range(2)))
            for parameter in self._parameters
        ]
        self._steps = 0

    @torch.no_grad()
    def step(self) -> None:
        """Clip, update, round; gradients are dropped."""
        self._steps += 1
        nn.utils.clip_grad_norm_(self._parameters, NORM_MAX)
        for parameter, (original, first, second) in zip(self._parameters, self._states, strict=True):
            if parameter.grad is None:
                continue
            torch._fused_adamw_(
                [original],
                [parameter.grad.float()],
                [first],
                [second],
                [],
                [torch.full((), float(self._steps), device=original.device)],
                lr=RATE,
                beta1=BETAS[0],
                beta2=BETAS[1],
                weight_decay=DECAY if parameter.dim() > 1 else 0.0,
                eps=EPSILON,
                amsgrad=False,
                maximize=False,
            )
            parameter.copy_(original)
            parameter.grad = None


def torch_head_loss(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    """Mean loss by torch's own head in chunks (torch 2.13)."""
    options = nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden_ND, head_VD, targets_N, options=options)


def head_loss(hidden_ND: Tensor, head_VD: Tensor, targets_N: Tensor) -> Tensor:
    """The same, by Liger's head where torch has none: no peer shall fail for the logits of 32K tokens."""
    if hasattr(nn, "LinearCrossEntropyOptions"):
        return torch_head_loss(hidden_ND, head_VD, targets_N)
    from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy

    loss: Tensor = liger_fused_linear_cross_entropy(hidden_ND, head_VD, targets_N)
    return loss


def transformers_model(shape: ModelShape, place: Place) -> Any:
    """``DeepseekV3ForCausalLM``, weights drawn, grouped products and sdpa."""
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    options: dict[str, Any] = {"attn_implementation": "sdpa", "experts_implementation": "grouped_mm"}
    with torch.device(place.device):
        config = DeepseekV3Config(**text_config(shape.decoder), **options)
        model: Any = DeepseekV3ForCausalLM(config)
        return model.to(place.dtype).train()


def transformers_step(shape: ModelShape, place: Place, tokens_BS: Tensor, *, balanced: bool, compiled: bool) -> Any:
    """A training step of it; a batch without padding, which suits it best."""
    if compiled:
        need_device(place, "the compiler takes longer than all the rest")
    model = transformers_model(shape, place)
    if balanced:
        for module in model.modules():
            if type(module).__name__ == "DeepseekV3TopkRouter":
                module.forward = round_robin(module.forward, module.num_experts)
    body: Callable[..., Any] = torch.compile(model.model) if compiled else model.model
    optimizer = MasterAdamW(model)
    tokens_BS, targets_N = tokens_BS[:, :-1], tokens_BS[:, 1:].flatten()

    def step() -> Tensor:
        hidden_BSD = body(input_ids=tokens_BS, use_cache=False).last_hidden_state
        loss = head_loss(hidden_BSD.flatten(0, 1), model.lm_head.weight, targets_N)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def round_robin(natural: Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], experts: int) -> Callable[..., Any]:
    """Make its router hand rows out in turns, after all that it does."""

    def forward(hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits, weights_TK, chosen_TK = natural(hidden)
        rows = torch.arange(chosen_TK.numel(), device=chosen_TK.device, dtype=chosen_TK.dtype)
        return logits, weights_TK, (rows % experts).view_as(chosen_TK)

    return forward


def torchtitan_config(shape: ModelShape) -> Any:
    """Its Kimi-VL-A3B, cut to the same layers; without a tower its moonlight-16B-A3B."""
    from torchtitan.models.kimi_k2_7 import kimi_k2_5_configs

    flavor = "Kimi-VL-A3B" if shape.sees else "moonlight-16B-A3B"
    config = kimi_k2_5_configs[flavor](attn_backend="flex", moe_comm_backend="standard")
    return dataclasses.replace(config, layers=config.layers[: shape.decoder.layers])


def torchtitan_step(shape: ModelShape, place: Place, tokens_BS: Tensor, *, balanced: bool) -> Any:
    """A training step of its model, each block compiled as its trainer does, flex attention."""
    need_device(place, "torchtitan's attention has no backward on processors")
    config = torchtitan_config(shape)
    model = built(config, place)
    for block in model.layers.values():
        if balanced and block.moe_enabled:
            block.moe.router._debug_force_load_balance = True  # noqa: SLF001 - it has no public name
        block.compile()
    optimizer = MasterAdamW(model)
    tokens_BS, targets_N = tokens_BS[:, :-1].contiguous(), tokens_BS[:, 1:].flatten()
    positions_BS = torch.arange(tokens_BS.shape[1], device=place.device).expand_as(tokens_BS).contiguous()
    masks = model.get_attention_masks(positions_BS)
    model._skip_lm_head = True  # noqa: SLF001 - what its chunked loss does

    def step() -> Tensor:
        hidden_BSD = model(tokens_BS, attention_masks=masks, positions=positions_BS)
        loss = head_loss(hidden_BSD.flatten(0, 1), model.lm_head.weight, targets_N)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def built(config: Any, place: Place) -> Any:
    """Build a module of torchtitan on the device, its states drawn by its own rules, in the type that is measured."""
    with torch.device("meta"):
        module = config.build()
    module.to_empty(device=place.device)
    with torch.no_grad():
        module.init_states(buffer_device=place.device)
    for parameter in module.parameters():
        parameter.data = parameter.data.to(place.dtype)
    return module.train()
