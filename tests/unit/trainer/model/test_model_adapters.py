"""Adapters: gradients follow from those of the merged model, which answers alike; nothing else learns or changes."""

from __future__ import annotations

import torch

from polyreme_planner.adapters import Adapters, Target, adapter_parameters
from polyreme_planner.curriculum import CurriculumStage
from polyreme_planner.model_parts import all_parts
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.adapters import adapter_names, is_adapter, merged
from polyreme_trainer.model.decoder import Decoded
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.loss import token_loss
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.train.state import let_learn
from tests.unit.trainer.model.conftest import MEDIA, Batch, make_batch

ADAPTERS = Adapters(rank=8, alpha=4.0, targets=frozenset(Target))


def adapted_model(adapters: Adapters = ADAPTERS) -> KimiVL:
    model = build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA, adapters=adapters)
    generator = torch.Generator().manual_seed(5)
    for name, parameter in model.named_parameters():
        if name.endswith("lora_B"):
            torch.nn.init.normal_(parameter, std=0.1, generator=generator)
    return model


def merged_model(adapted: KimiVL) -> KimiVL:
    model = build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA)
    held = adapted.state_dict()
    model.load_state_dict({name: merged(held, name, adapted.adapters) for name in model.state_dict()})
    return model


def hidden(model: KimiVL, batch: Batch) -> torch.Tensor:
    decoded: Decoded = model(batch.tokens_T, batch.positions_T, batch.offsets, batch.patches_PC, batch.grids)
    return decoded.hidden_TD


def test_gradients_are_the_merged_models_projected() -> None:
    adapted = adapted_model()
    whole = merged_model(adapted)
    batch = make_batch([40, 24], [[(4, 4)], []])
    for model in (adapted, whole):
        let_learn(model, CurriculumStage(steps=1))
        loss, _ = token_loss(hidden(model, batch), model.language_model.lm_head.weight, batch.targets_T)
        loss.backward()
    named = dict(adapted.named_parameters())
    matrices = [name for name, _ in whole.named_parameters() if adapter_names(name)[0] in named]
    assert len(matrices) == 3 * 4 + 3 * 3 + 2 * 2, "attention, feed-forwards, grouped products"
    for name in matrices:
        grad_W = whole.get_parameter(name).grad
        a, b = (named[adapter] for adapter in adapter_names(name))
        assert grad_W is not None
        assert a.grad is not None
        assert b.grad is not None
        for seen, expected in ((b.grad, 0.5 * grad_W @ a.mT), (a.grad, 0.5 * b.mT @ grad_W)):
            assert (seen - expected).abs().max() <= 1e-5 * expected.abs().max(), name
    assert all(parameter.grad is None for name, parameter in named.items() if not is_adapter(name))


def test_a_merged_model_answers_as_its_adapters_do() -> None:
    adapted, batch = adapted_model(), make_batch([40, 24], [[(4, 4)], []])
    drawn = build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA)
    seen, same, other = (
        model.logits(hidden(model, batch)).log_softmax(-1) for model in (adapted, merged_model(adapted), drawn)
    )
    assert (seen - same).abs().max() <= 1e-5
    assert (seen - other).abs().max() > 1e-2


def test_adapters_that_were_only_drawn_change_no_answer_and_are_as_many_as_planned() -> None:
    model, batch = build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA, adapters=ADAPTERS), make_batch([20], [[]])
    assert torch.equal(hidden(model, batch), hidden(build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA), batch))
    for target in Target:
        adapters = Adapters(rank=8, alpha=4.0, targets=frozenset({target}))
        one = build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA, adapters=adapters)
        added = sum(parameter.numel() for name, parameter in one.named_parameters() if is_adapter(name))
        assert added == sum(sum(adapter_parameters(KIMI_VL_NANO, adapters, part)) for part in all_parts(KIMI_VL_NANO))
