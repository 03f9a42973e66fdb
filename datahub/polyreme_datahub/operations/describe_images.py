"""Caption and embed: run a model on the images of many samples at once, on a GPU or a CPU.

``caption`` and ``embed`` run on workers with a GPU; ``caption-cpu`` and ``embed-cpu`` are the same for small models. A
failure on one image ends the whole call; the sandbox then tries each sample alone, so that only the bad one ends.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import Device, operation
from polyreme_datahub.operations.models import Infer, Model, infer_all, load_model, plan_batches
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob, Dropped, Value

SAMPLES_MAX = 256
CAPTION_CHARACTERS_MAX = 65_536
Ends = list[Value | BadRecordError | Dropped]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelParameters:
    """How many images a model sees at once."""

    images_max: int = 32
    pixels_max: int = 32_000_000
    """Of a batch, each image counted as its largest."""

    def __post_init__(self) -> None:
        for name in ("images_max", "pixels_max"):
            if getattr(self, name) < 1:
                raise InvalidConfigError(f"{name} is {getattr(self, name)}, expected at least 1", field=name)


@operation("caption", 1, inputs=("decode", "model"), device="gpu", batch=SAMPLES_MAX, parameters=ModelParameters)
def caption(decoded: Sequence[Value], models: Sequence[Value], parameters: ModelParameters) -> Ends:
    """Describe each image of each sample: ``{"captions": [text, ...]}``."""
    return _run(decoded, models, parameters, device="gpu", method=lambda model: model.caption, build=_captions)


@operation("caption-cpu", 1, inputs=("decode", "model"), batch=SAMPLES_MAX, parameters=ModelParameters)
def caption_cpu(decoded: Sequence[Value], models: Sequence[Value], parameters: ModelParameters) -> Ends:
    """Do what ``caption`` does, on a CPU."""
    return _run(decoded, models, parameters, device="cpu", method=lambda model: model.caption, build=_captions)


@operation("embed", 1, inputs=("decode", "model"), device="gpu", batch=SAMPLES_MAX, parameters=ModelParameters)
def embed(decoded: Sequence[Value], models: Sequence[Value], parameters: ModelParameters) -> Ends:
    """Make a vector of each image: ``{"vectors": digest, "images": n, "dimensions": d}``, a blob of float32 [n, d]."""
    return _run(decoded, models, parameters, device="gpu", method=lambda model: model.embed, build=_vectors)


@operation("embed-cpu", 1, inputs=("decode", "model"), batch=SAMPLES_MAX, parameters=ModelParameters)
def embed_cpu(decoded: Sequence[Value], models: Sequence[Value], parameters: ModelParameters) -> Ends:
    """Do what ``embed`` does, on a CPU."""
    return _run(decoded, models, parameters, device="cpu", method=lambda model: model.embed, build=_vectors)


def _run(
    decoded: Sequence[Value],
    models: Sequence[Value],
    parameters: ModelParameters,
    *,
    device: Device,
    method: Callable[[Model], Infer],
    build: Callable[[Sequence[Any]], Value],
) -> Ends:
    """Run a model on all images of all samples, in batches by count and pixels, and give each sample its own."""
    if len({model.digest for model in models}) > 1:
        raise InvalidConfigError("samples of one call have different models, expected one for all", field="model")
    sources = [(at, image) for at, value in enumerate(decoded) for image in value.data.get("images", ())]
    results: list[list[Any]] = [[] for _ in decoded]
    refused: dict[int, BadRecordError] = {}
    by_source: dict[int, Any] = {}
    infer = method(load_model(models[0], device))
    pixels = [image["width"] * image["height"] for _, image in sources]
    for batch in plan_batches(pixels, images_max=parameters.images_max, pixels_max=parameters.pixels_max):
        opened = []
        for place in batch:
            at, image = sources[place]
            try:
                blob = decoded[at].blobs[image["digest"]]
                opened.append((place, blob.pixels(OpenRules(**image.get("open", {})))))
            except BadRecordError as error:
                refused[at] = error
        if opened:
            made = infer_all(infer, [pixels for _, pixels in opened])
            by_source |= {place: result for (place, _), result in zip(opened, made, strict=True)}
    for place, (at, _) in enumerate(sources):
        if at not in refused:
            results[at].append(by_source[place])
    return [refused[at] if at in refused else _built(build, results[at]) for at in range(len(decoded))]


def _built(build: Callable[[Sequence[Any]], Value], results: Sequence[Any]) -> Value | BadRecordError:
    try:
        return build(results)
    except BadRecordError as error:
        return error


def _captions(results: Sequence[Any]) -> Value:
    for text in results:
        if not isinstance(text, str) or not text.strip() or len(text) > CAPTION_CHARACTERS_MAX:
            seen = f"{len(text)} characters" if isinstance(text, str) else f"a {type(text).__name__}"
            raise BadRecordError(
                f"model's caption is {seen}, expected text of 1 to {CAPTION_CHARACTERS_MAX}", rule="model-output"
            )
    return Value.of({"captions": [text.strip() for text in results]})


def _vectors(results: Sequence[Any]) -> Value:
    vectors_ND = np.asarray(results, dtype="<f4")
    if not results:
        return Value.of({"vectors": None, "images": 0, "dimensions": 0})
    if vectors_ND.ndim != 2 or not np.isfinite(vectors_ND).all():
        raise BadRecordError(
            f"model's vectors have shape {vectors_ND.shape}, expected finite numbers [images, dimensions]",
            rule="model-output",
        )
    blob = Blob(vectors_ND.tobytes())
    images, dimensions = vectors_ND.shape
    return Value.of({"vectors": blob.digest, "images": images, "dimensions": dimensions}, made=[blob])
