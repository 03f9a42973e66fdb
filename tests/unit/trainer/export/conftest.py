"""A nano model with distinguishable weights, and its export."""

from __future__ import annotations

import pathlib
import shutil

import pytest
import torch

from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.moe import Router
from polyreme_trainer.model.vlm import KimiVL
from tests.exports import export_model
from tests.unit.trainer.export.reading import TOKENS


@pytest.fixture(scope="session")
def model() -> KimiVL:
    """Weights that differ everywhere, correction biases too; tests leave them as they are."""
    model = build_model(KIMI_VL_NANO, seed=5, media_token=TOKENS.media)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim < 2:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
            elif name.startswith("language_model.model.layers"):
                parameter.mul_(0.1 / KIMI_VL_NANO.decoder.initializer_range)
        for router in (module for module in model.modules() if isinstance(module, Router)):
            router.e_score_correction_bias.copy_(0.1 * torch.randn(8, generator=generator))
    return model


@pytest.fixture(scope="session")
def _exported(model: KimiVL, tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("weights") / "e"
    export_model(model.state_dict(), KIMI_VL_NANO, folder, tokens=TOKENS, shard_bytes_max=400_000)
    return folder


@pytest.fixture
def exported(_exported: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """A copy of the model's export that a test may damage: several files, and ``text/``."""
    return pathlib.Path(shutil.copytree(_exported, tmp_path / "weights"))
