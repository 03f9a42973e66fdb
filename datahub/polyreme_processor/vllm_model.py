"""vLLM's Kimi-VL with the image sizes of exported models.

vLLM counts the tokens of an image by Kimi-VL's rule, which pads an image to whole tokens; ours resizes it to them.
"""

from __future__ import annotations

from vllm.model_executor.models import kimi_vl
from vllm.multimodal import MULTIMODAL_REGISTRY

from polyreme_processor.processor import PolyremeImageProcessor


class ImageTokens(kimi_vl.KimiVLProcessingInfo):
    """Counts the tokens of images."""

    def get_num_image_tokens(self, *, image_width: int, image_height: int) -> int:
        """Count those of an image of some size [pixels]."""
        processor = self.get_hf_processor().image_processor
        if isinstance(processor, PolyremeImageProcessor):
            return processor.image_tokens(image_width, image_height)
        tokens: int = super().get_num_image_tokens(image_width=image_width, image_height=image_height)
        return tokens


@MULTIMODAL_REGISTRY.register_processor(
    kimi_vl.KimiVLMultiModalProcessor, info=ImageTokens, dummy_inputs=kimi_vl.KimiVLDummyInputsBuilder
)
class KimiVLForConditionalGeneration(kimi_vl.KimiVLForConditionalGeneration):
    """The same model."""
