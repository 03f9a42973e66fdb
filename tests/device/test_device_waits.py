"""Waits of the host in a step, as CUDA reports them: one, and one a layer where rows are exchanged unevenly."""

from __future__ import annotations

import dataclasses
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from polyreme_planner.costs import Recompute
from polyreme_planner.flops import Mix
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.model.moe import MixtureOfExperts
from polyreme_trainer.parallel.dispatch import AllToAllDispatcher
from polyreme_trainer.parallel.world import open_world
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.settings import Precision
from polyreme_trainer.train.state import backward, open_state, reduce, update
from tests.device.conftest import settings_of

pytestmark = pytest.mark.device

LAYERS, MICROBATCHES, STEPS = 3, 2, 3
SHAPE = dataclasses.replace(
    KIMI_VL_NANO, decoder=dataclasses.replace(KIMI_VL_NANO.decoder, layers=LAYERS + 1, dense_layers=1)
)
WAIT = "called a synchronizing"
"""How torch's report of a wait begins."""
MIX = Mix(sequence_tokens=48, image_patches=64, visual_share=0.4)


@pytest.mark.parametrize("recompute", Recompute)
@pytest.mark.parametrize("uneven", [False, True], ids=["alone", "uneven"])
def test_a_step_waits_at_its_known_places(
    device: torch.device, tmp_path: Path, recompute: Recompute, uneven: bool
) -> None:
    options = ComputeOptions(recompute=recompute)
    settings = settings_of(
        device, tmp_path, shape=SHAPE, precision=Precision.BFLOAT16, compute_options=options, steps=STEPS
    )
    with open_world(settings.rank, settings.layout) as world:
        state = open_state(settings, world.meshes, media_token=MEDIA_TOKEN)
        for module in state.stages[0].modules():
            if isinstance(module, MixtureOfExperts) and uneven:
                module.dispatcher = AllToAllDispatcher(world.meshes.world_group)

        def step() -> None:
            batches = [synthetic_packs(SHAPE, MIX, packs=2, seed=seed) for seed in range(MICROBATCHES)]
            microbatches = [to_inputs(batch, device=device, media_token=MEDIA_TOKEN) for batch in batches]
            total = reduce(state, backward(state, *microbatches), world.meshes)
            update(state, total, settings.optimizer, rate=1e-3)

        for _ in range(STEPS - 1):  # the first steps load kernels
            step()
        found = waits_of(step)
    expected = Counter({"gradients.py": 1}) + Counter({"dispatch.py": LAYERS * MICROBATCHES * uneven})
    if device.type == "cuda":
        assert found == expected


def waits_of(step: Callable[[], None]) -> Counter[str]:
    """Count the waits by the module in which they are."""
    with warnings.catch_warnings(record=True) as reports:
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            torch.cuda.set_sync_debug_mode("warn")
        try:
            step()
        finally:
            if torch.cuda.is_available():
                torch.cuda.set_sync_debug_mode("default")
    return Counter(Path(report.filename).name for report in reports if str(report.message).startswith(WAIT))
