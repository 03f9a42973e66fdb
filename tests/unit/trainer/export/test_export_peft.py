"""Exported adapters load in PEFT beside the base's text part, and answer as ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from polyreme_api.batch import TokenIds
from polyreme_planner.adapters import Adapters, Target
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.export.peft import export_adapters
from polyreme_trainer.model.adapters import is_adapter
from polyreme_trainer.model.initialise import build_model
from tests.exports import export_model
from tests.unit.trainer.model.conftest import MEDIA
from tests.unit.trainer.model.test_model_adapters import adapted_model

TOKENS = TokenIds(media=MEDIA, end=1, pad=0)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")  # PEFT asks transformers for it
@pytest.mark.parametrize("targets", [set(Target), {Target.ATTENTION}, {Target.DENSE}, {Target.EXPERTS}], ids=sorted)
def test_peft_answers_as_we_do(tmp_path: Path, targets: set[Target]) -> None:
    # It takes seconds to import, which other tests of this folder must not pay.
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    adapters = Adapters(rank=8, alpha=4.0, targets=frozenset(targets))
    ours, base = adapted_model(adapters), build_model(KIMI_VL_NANO, seed=3, media_token=MEDIA)
    export_model(base.state_dict(), KIMI_VL_NANO, tmp_path / "base", tokens=TOKENS)
    held = {name: tensor for name, tensor in ours.state_dict().items() if is_adapter(name)}
    export_adapters(held, adapters, tmp_path / "adapters", base=str(tmp_path / "base" / "text"))
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "base" / "text", dtype=torch.float32)
    adapted = PeftModel.from_pretrained(theirs, tmp_path / "adapters")
    counts = [parameter.numel() for name, parameter in adapted.named_parameters() if "lora_" in name]
    assert sum(counts) == sum(tensor.numel() for tensor in held.values())
    tokens_T = torch.arange(10, 50)
    with torch.no_grad():
        seen = adapted(tokens_T.unsqueeze(0)).logits[0].log_softmax(-1)
        decoded = ours(tokens_T, torch.arange(40), [0, 40], torch.zeros(0, 588), [])
        expected = ours.logits(decoded.hidden_TD).log_softmax(-1)
    assert (seen - expected).abs().max() <= 2e-5
