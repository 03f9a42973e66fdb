"""The interface of models that caption and embed images, and the batches in which they see them.

A model is the value of a step, the same for all samples, so that it is part of every key:
``{"factory": "package.module:function", "weights": digest or null, "config": {...}}``, with the weights as a blob. The
function takes config, weights and device, and returns the model. The package must be installed where the step runs;
nothing is downloaded.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

from PIL import Image

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.operations.declare import Device
from polyreme_datahub.operations.values import Value

Infer = Callable[[Sequence[Image.Image]], Sequence[Any]]


class Model(Protocol):
    """A loaded model. Either method may raise NotImplementedError. Out of memory, the batch is halved."""

    def caption(self, images: Sequence[Image.Image]) -> Sequence[str]:
        """Describe each image."""
        ...

    def embed(self, images: Sequence[Image.Image]) -> Sequence[Sequence[float]]:
        """Return a vector for each image, all of one length."""
        ...


_LOADED: dict[tuple[str, str], Model] = {}


def load_model(value: Value, device: Device) -> Model:
    """Load a model; the newest one is kept.

    Raises:
        InvalidConfigError: If its factory can't be imported.
    """
    key = (value.digest, device)
    if key not in _LOADED:
        path = str(value.data["factory"])
        module, _, name = path.partition(":")
        try:
            factory = getattr(importlib.import_module(module), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise InvalidConfigError(f"model {path!r} can't be imported: {error}", field="factory") from error
        weights = value.data.get("weights")
        model = factory(value.data.get("config", {}), None if weights is None else value.blobs[weights].data, device)
        _LOADED.clear()
        _LOADED[key] = model
    return _LOADED[key]


def plan_batches(pixels: Sequence[int], *, images_max: int, pixels_max: int) -> Iterator[list[int]]:
    """Yield batches of images, by place: of similar sizes, since a batch is padded to its largest.

    An image that has more pixels than a batch may have is a batch by itself.

    Args:
        pixels: Pixels of each image.
        images_max: Most images of a batch.
        pixels_max: Most pixels of a batch, each image counted as its largest.
    """
    batch: list[int] = []
    for place in sorted(range(len(pixels)), key=lambda at: (-pixels[at], at)):
        if batch and (len(batch) >= images_max or pixels[batch[0]] * (len(batch) + 1) > pixels_max):
            yield batch
            batch = []
        batch.append(place)
    if batch:
        yield batch


def infer_all(infer: Infer, images: Sequence[Image.Image]) -> list[Any]:
    """Run a model on a batch; if it runs out of memory, on its halves, down to single images.

    Raises:
        MemoryError: If it can't run on a single image.
        TypeError: If it returns another number of results.
    """
    try:
        results = list(infer(images))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        if len(images) == 1:
            raise MemoryError(f"model ran out of memory on one image of {images[0].size} pixels: {error}") from error
    else:
        if len(results) != len(images):
            raise TypeError(f"model returned {len(results)} results for {len(images)} images")
        return results
    half = len(images) // 2
    return infer_all(infer, images[:half]) + infer_all(infer, images[half:])


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error says that host or device have no memory left; torch's own class is known by its name."""
    return isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError"
