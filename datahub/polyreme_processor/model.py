"""Exported models in transformers: Kimi-VL by the classes of Kimi-K2.5, whose tower and decoder are the same.

An image is a clip of one frame, which takes no position in time. Names in files differ in the projector alone.
"""

from __future__ import annotations

from typing import Any, ClassVar

import torch
from transformers.conversion_mapping import get_checkpoint_conversion_mapping, register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightRenaming
from transformers.models.kimi_k25.configuration_kimi_k25 import Kimi_K25Config, Kimi_K25VisionConfig
from transformers.models.kimi_k25.modeling_kimi_k25 import Kimi_K25ForConditionalGeneration

MODEL_TYPE = "kimi_vl"


class KimiVLVisionConfig(Kimi_K25VisionConfig):
    """MoonViT under the names of Kimi-VL."""

    model_type = "moonvit"
    attribute_map: ClassVar[dict[str, str]] = {
        "init_pos_emb_height": "pos_emb_height",
        "init_pos_emb_width": "pos_emb_width",
    }


class KimiVLConfig(Kimi_K25Config):
    """Configuration of an exported model."""

    model_type = MODEL_TYPE
    attribute_map: ClassVar[dict[str, str]] = {"media_placeholder_token_id": "image_token_id"}

    def __post_init__(self, **kwargs: Any) -> None:
        """Read the tower's part, take the projector's width from it, and name no token as that of a video."""
        if isinstance(self.vision_config, dict):
            self.vision_config = KimiVLVisionConfig(**self.vision_config)
        super().__post_init__(**kwargs)
        tower: Any = self.vision_config
        self.projection_hidden_size = tower.hidden_size
        self.video_token_id = -1


class KimiVLForConditionalGeneration(Kimi_K25ForConditionalGeneration):
    """Answers questions about images; ``image_grid_hws`` is rows and columns of each image [patches]."""

    config_class: Any = KimiVLConfig

    def forward(
        self,
        input_ids: torch.Tensor | None = None,
        pixel_values: torch.Tensor | None = None,
        image_grid_hws: torch.Tensor | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the model on tokens and patches."""
        grid_thw = _as_clips(image_grid_hws)
        return super().forward(input_ids=input_ids, pixel_values=pixel_values, image_grid_thw=grid_thw, **kwargs)


def _as_clips(grid_hws: torch.Tensor | None) -> torch.Tensor | None:
    return None if grid_hws is None else torch.nn.functional.pad(grid_hws, (1, 0), value=1)


def register_names() -> None:
    """Name the tensors of files as those of the model."""
    projector = [
        WeightRenaming(source_patterns=f"multi_modal_projector.{ours}", target_patterns=f"model.mm_projector.{theirs}")
        for ours, theirs in (("pre_norm", "pre_norm"), ("linear_1", "in_proj"), ("linear_2", "out_proj"))
    ]
    tower_and_decoder = get_checkpoint_conversion_mapping("kimi_k25") or []
    register_checkpoint_conversion_mapping(MODEL_TYPE, [*projector, *tower_and_decoder], overwrite=True)
