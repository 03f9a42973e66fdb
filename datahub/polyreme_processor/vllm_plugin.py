"""Plugin by which vLLM serves exported models with images; vLLM finds it by its entry point and calls ``register``."""

from __future__ import annotations

from vllm import ModelRegistry

import polyreme_processor

MODEL = "KimiVLForConditionalGeneration"


def register() -> None:
    """Let vLLM count an image's tokens as the export's processor does; other models of the class stay as they are."""
    ModelRegistry.register_model(MODEL, f"{polyreme_processor.__name__}.vllm_model:{MODEL}")
