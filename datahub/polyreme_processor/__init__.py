"""Classes by which other libraries load an exported model, without code in its folder: import this, then load.

import polyreme_processor
processor = AutoProcessor.from_pretrained("model")
model = AutoModelForImageTextToText.from_pretrained("model")
"""

from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoProcessor

from polyreme_processor.model import KimiVLConfig, KimiVLForConditionalGeneration, register_names
from polyreme_processor.processor import PolyremeImageProcessor, PolyremeProcessor

AutoConfig.register(KimiVLConfig.model_type, KimiVLConfig, exist_ok=True)
AutoImageProcessor.register(KimiVLConfig, image_processor_classes={"pil": PolyremeImageProcessor}, exist_ok=True)
AutoProcessor.register(KimiVLConfig, PolyremeProcessor, exist_ok=True)
AutoModelForImageTextToText.register(KimiVLConfig, KimiVLForConditionalGeneration, exist_ok=True)
register_names()
