"""Time of each part of a model on one device: forward, gradient of the inputs, gradient of the weights.

A part is built alone, run on a synthetic pack, and timed with synchronisation of the device. The gradient of the inputs
is timed by itself; that of the weights is the difference to the whole backward.

Legend: T tokens, D decoder width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from polyreme_api.clock import Clock
from polyreme_planner.flops import Mix
from polyreme_planner.model_parts import Part, all_parts
from polyreme_planner.pipeline_simulation import StageTimes
from polyreme_planner.shapes import ModelShape
from polyreme_planner.stage_split import NOTHING
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.section import Section
from polyreme_trainer.model.segment_attention import segments
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, Images, synthetic_packs
from polyreme_trainer.train.inputs import Inputs, to_inputs

REPEATS = 5
"""Timed runs of a part, after one warm-up run; the least is reported, since other work only adds time."""


def measure_parts(
    shape: ModelShape,
    mix: Mix,
    *,
    device: str,
    clock: Clock,
    dtype: torch.dtype = torch.float32,
) -> dict[Part, StageTimes]:
    """Time one part of each kind that the model has [seconds for one token of the language model].

    Args:
        shape: Sizes of the model.
        mix: Content of a pack.
        device: Where to run.
        clock: Steady time.
        dtype: Of weights and activations.
    """
    torch.set_num_threads(1)  # as a rank
    batch = to_inputs(synthetic_packs(shape, mix, packs=1, seed=0), device=device)
    times: dict[Part, StageTimes] = {}
    for part in dict.fromkeys(all_parts(shape)):
        if part is Part.TOWER and not batch.grids:
            times[part] = NOTHING
            continue
        run, inputs, weights = _part(shape, part, batch, device=device, dtype=dtype)
        took = _timed(run, inputs, weights, device=device, clock=clock)
        # Whole square images do not match the mix exactly: the tower's time is scaled to the patches of the mix.
        share = _tower_share(shape, mix) if part is Part.TOWER else 1.0
        each = share / mix.sequence_tokens
        times[part] = StageTimes(
            forward_s=took.forward_s * each, input_s=took.input_s * each, weight_s=took.weight_s * each
        )
    return times


def _tower_share(shape: ModelShape, mix: Mix) -> float:
    patches = Images.of(shape, mix).patches
    return mix.patches_per_token(shape) * mix.sequence_tokens / patches if patches else 1.0


def _part(
    shape: ModelShape, part: Part, batch: Inputs, *, device: str, dtype: torch.dtype
) -> tuple[Callable[[], Tensor], list[Tensor], list[Tensor]]:
    """Build a part: the function to run, the inputs whose gradient the part before would wait for, and the weights."""
    d = shape.decoder
    tokens = batch.tokens_T.shape[0]
    stream_TD = torch.randn(tokens, d.width, device=device, dtype=dtype, requires_grad=True)

    def built(layers: range, *, first: bool = False, last: bool = False) -> KimiVL:
        section = Section(layers=layers, first=first, last=last)
        return build_model(shape, seed=0, media_token=MEDIA_TOKEN, section=section, device=device, dtype=dtype)

    if part in {Part.TOWER, Part.EMBEDDING}:
        model = built(range(0), first=True)
        if part is Part.TOWER:
            tower: list[Tensor] = [*model.vision_tower.parameters(), *model.multi_modal_projector.parameters()]
            return lambda: model.image_features(batch.patches_PC, batch.grids), [], tower
        table: list[Tensor] = [model.language_model.model.embed_tokens.weight]
        return lambda: model.language_model.model.embed(batch.tokens_T), [], table
    if part is Part.HEAD:
        model = built(range(d.layers, d.layers), last=True)

        def loss() -> Tensor:
            hidden_TD = model.language_model.model.norm(stream_TD)
            return token_loss(
                hidden_TD, model.language_model.lm_head.weight, batch.targets_T, learned_N=batch.learned_N
            )[0]

        return loss, [stream_TD], list(model.parameters())
    index = 0 if part is Part.DENSE else d.dense_layers
    model = built(range(index, index + 1))
    documents = segments([tokens], causal=True, device=stream_TD.device, dtype=dtype)

    def layer() -> Tensor:
        return model.decode(stream_TD, batch.positions_T, lambda _: documents.attend).hidden_TD

    return layer, [stream_TD], list(model.parameters())


def _timed(
    run: Callable[[], Tensor],
    inputs: Sequence[Tensor],
    weights: Sequence[Tensor],
    *,
    device: str,
    clock: Clock,
) -> StageTimes:
    """Time a part, by the least of each of its three pieces [seconds]."""

    def rounds() -> Iterator[tuple[float, float, float]]:
        for _ in range(REPEATS + 1):
            begin_s = _now_s(device, clock)
            out = run()
            forward_s = _now_s(device, clock) - begin_s
            grad = torch.randn_like(out) if out.ndim else torch.ones_like(out)
            input_s = _gradient_s(out, grad, inputs, device, clock) if inputs else 0.0
            whole_s = _gradient_s(out, grad, [*inputs, *weights], device, clock)
            yield forward_s, input_s, whole_s

    forward_s, input_s, whole_s = (min(column) for column in zip(*list(rounds())[1:], strict=True))
    return StageTimes(forward_s=forward_s, input_s=input_s, weight_s=max(0.0, whole_s - input_s))


def _gradient_s(out: Tensor, grad: Tensor, of: Sequence[Tensor], device: str, clock: Clock) -> float:
    begin_s = _now_s(device, clock)
    torch.autograd.grad(out, of, grad, retain_graph=True, allow_unused=True)
    return _now_s(device, clock) - begin_s


def _now_s(device: str, clock: Clock) -> float:
    if device != "cpu":
        torch.cuda.synchronize()
    return clock.steady_s()
