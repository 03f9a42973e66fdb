"""Settings of plans for tests."""

from __future__ import annotations

from polyreme_planner.costs import Setting
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import FLOAT32, HARDWARE, Numerics
from polyreme_planner.shapes import KIMI_VL_A3B, ModelShape


def setting_of(
    *,
    shape: ModelShape = KIMI_VL_A3B,
    tokens: int = 4096,
    visual_share: float = 0.5,
    hardware: str = "h100-80g",
    numerics: Numerics = FLOAT32,
) -> Setting:
    """Price a model on some hardware."""
    mix = Mix(sequence_tokens=tokens, visual_share=visual_share)
    return Setting(shape=shape, mix=mix, hardware=HARDWARE[hardware], numerics=numerics)
