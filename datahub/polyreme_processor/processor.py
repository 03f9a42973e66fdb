"""Processor of exported models for transformers and vLLM: the pixels and tokens that the model was trained on.

Names of fields are those of Kimi-VL's processor, which vLLM reads.

Legend: P patches of all images, I images, C channels, S side of a patch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image
from transformers import BatchFeature
from transformers.image_processing_utils import BaseImageProcessor
from transformers.processing_utils import ProcessorMixin

from polyreme_datahub.index.format import BY_CONVOLUTION
from polyreme_datahub.loader.sample.image_patches import image_patches
from polyreme_datahub.loader.sample.pixels import CHANNELS
from polyreme_datahub.operations.fit_pages import ComposeParameters, fitting_size

WHITE = 255


class PolyremeImageProcessor(BaseImageProcessor):
    """Makes patches of images as training does.

    An image is encoded (its bytes, or the path of a file) or decoded (Pillow's, or an array of bytes [rows, columns,
    channels]). From its bytes all pixels are those of training. A decoded one differs by a few levels where it comes
    from a JPEG of more than twice the page's width and height, which training decodes at a smaller scale.
    """

    model_input_names = ["pixel_values", "image_grid_hws"]  # noqa: RUF012

    def __init__(
        self,
        *,
        patch_size: int = 14,
        merge_kernel_size: Sequence[int] = (2, 2),
        in_token_limit: int = 4096,
        image_token: str = "<|media_pad|>",
        pixel_version: int = BY_CONVOLUTION,
        **fields: Any,
    ) -> None:
        """Take the fields of ``preprocessor_config.json``.

        Args:
            patch_size: Side of a patch [pixels].
            merge_kernel_size: Patches per token, each way.
            in_token_limit: Most patches of an image; larger images are shrunk.
            image_token: Marks the place of an image in a text.
            pixel_version: How an image is resized (``polyreme_datahub.index.format``).
            fields: What transformers keeps beside them.
        """
        super().__init__(**fields)
        self.patch_size = patch_size
        self.merge_kernel_size = list(merge_kernel_size)
        self.in_token_limit = in_token_limit
        self.image_token = image_token
        self.pixel_version = pixel_version

    def preprocess(self, images: Any, return_tensors: str | None = None, **_: Any) -> BatchFeature:
        """Return ``pixel_values`` [P, C, S, S], normalised, and ``image_grid_hws`` [I, 2]."""
        made = [
            image_patches(_opened(image), self._parameters, pixel_version=self.pixel_version) for image in _flat(images)
        ]
        patches_PC = np.concatenate([patches for patches, _ in made])
        pixels = (patches_PC.astype(np.float32) - np.float32(WHITE / 2)) / np.float32(WHITE / 2)
        shape = (-1, CHANNELS, self.patch_size, self.patch_size)
        data = {"pixel_values": pixels.reshape(shape), "image_grid_hws": np.array([grid for _, grid in made], np.int64)}
        return BatchFeature(data=data, tensor_type=return_tensors)

    def image_tokens(self, width: int, height: int) -> int:
        """Count the tokens of an image of some size [pixels]."""
        page_width, page_height = fitting_size(width, height, self._parameters)
        return page_width * page_height // self._parameters.token_px**2

    def get_number_of_image_patches(self, height: int, width: int, images_kwargs: object = None) -> int:  # noqa: ARG002
        """Count the patches of an image of some size [pixels], for those who call it by this name."""
        return self.image_tokens(width, height) * self._parameters.merge**2

    @property
    def _parameters(self) -> ComposeParameters:
        merge = self.merge_kernel_size[0]
        return ComposeParameters(
            patch_px=self.patch_size, merge=merge, image_tokens_max=self.in_token_limit // merge**2
        )


class PolyremeProcessor(ProcessorMixin):
    """Replaces each image's token in a text by as many as the image has, beside ``PolyremeImageProcessor``."""

    def __init__(self, image_processor: Any = None, tokenizer: Any = None, chat_template: str | None = None) -> None:
        """Join an image processor and a tokenizer; the chat template is the tokenizer's, unless another is given."""
        super().__init__(image_processor, tokenizer, chat_template=chat_template or tokenizer.chat_template)
        self.image_token: str = image_processor.image_token
        self.image_token_id: int = tokenizer.convert_tokens_to_ids(self.image_token)

    def __call__(
        self, images: Any = None, text: str | Sequence[str] = "", return_tensors: str | None = None, **options: Any
    ) -> BatchFeature:
        """Return the tokens of texts and the patches of their images, in the order of the images' tokens.

        Args:
            images: As ``PolyremeImageProcessor`` takes them, one or several.
            text: One or several texts with a token for each image.
            return_tensors: ``pt`` or ``np``.
            options: Of the tokenizer, by themselves or as ``text_kwargs``.

        Raises:
            ValueError: If the texts name another number of images.
        """
        texts = [text] if isinstance(text, str) else list(text)
        features: Mapping[str, Any] = {}
        counts: list[int] = []
        if images is not None and _flat(images):
            features = self.image_processor.preprocess(images)
            cells = np.prod(self.image_processor.merge_kernel_size)
            counts = (features["image_grid_hws"].prod(axis=1) // cells).tolist()
        asked = sum(one.count(self.image_token) for one in texts)
        if asked != len(counts):
            raise ValueError(
                f"texts and images do not fit: {asked} of {self.image_token!r} in {len(texts)} texts, {len(counts)} "
                "images; write the token once for each image"
            )
        left = iter(counts)
        written = [_repeated(one, self.image_token, left) for one in texts]
        options |= options.pop("text_kwargs", {})
        options = {name: value for name, value in options.items() if not name.endswith("_kwargs")}
        encoded = self.tokenizer(written, add_special_tokens=options.pop("add_special_tokens", False), **options)
        return BatchFeature(data={**encoded, **features}, tensor_type=return_tensors)

    @property
    def model_input_names(self) -> list[str]:
        """Names of what a call returns."""
        return [*self.tokenizer.model_input_names, *self.image_processor.model_input_names]


def _repeated(text: str, token: str, counts: Any) -> str:
    first, *rest = text.split(token)
    return first + "".join(token * next(counts) + part for part in rest)


def _flat(images: Any) -> list[Any]:
    """Return images as one list, whether they came alone, as a list, or as a list for each text."""
    if not isinstance(images, list | tuple):
        return [images]
    return [image for part in images for image in _flat(part)]


def _opened(image: Any) -> bytes | Image.Image:
    if isinstance(image, bytes | Image.Image):
        return image
    if isinstance(image, str | Path):
        return Path(image).read_bytes()
    pixels: npt.NDArray[Any] = np.asarray(image)
    if pixels.dtype != np.uint8 or pixels.ndim not in {2, 3}:
        raise ValueError(
            f"image is {pixels.dtype} {pixels.shape}, expected bytes of a file, a path, Pillow's image, or uint8 "
            "[rows, columns, channels]"
        )
    return Image.fromarray(pixels)
