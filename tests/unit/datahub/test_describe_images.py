"""Caption and embed: one interface, batches by count and pixels, and what a bad image or little memory costs."""

from __future__ import annotations

import io
import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from polyreme_api.errors import InvalidConfigError
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.operations.declare import find_operation
from polyreme_datahub.operations.decode_images import DecodeParameters, decode
from polyreme_datahub.operations.describe_images import ModelParameters, caption_cpu, embed_cpu
from polyreme_datahub.operations.models import plan_batches
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.sandbox import Sandbox
from polyreme_datahub.sandbox.tasks import SampleTask, SandboxStep, StepMade, StepVerdict
from polyreme_datahub.sources.digits import load_scans
from tests.unit.datahub import digit_models

FACTORY = "tests.unit.datahub.digit_models:make"


def model_value(factory: str, config: dict[str, int] | None = None) -> Value:
    return Value.of({"factory": factory, "weights": None, "config": config or {}})


MODEL = model_value(FACTORY, {"dimensions": 12})


def scan(number: int, *, px: int = 32) -> Image.Image:
    ink, _ = load_scans()
    gray = (255 - ink[number].astype(np.int64) * 255 // 16).astype(np.uint8)
    return Image.fromarray(gray).resize((px, px), Image.Resampling.NEAREST)


def record(*images: Image.Image) -> Value:
    blobs = []
    for image in images:
        buffer = io.BytesIO()
        image.save(buffer, "PNG")
        blobs.append(Blob(buffer.getvalue()))
    content = {
        "kind": "images",
        "images": [blob.digest for blob in blobs],
        "masks": [None] * len(blobs),
        "boxes": [],
    }
    return Value.of(content, kept=blobs)


def decoded(*images: Image.Image) -> Value:
    value: Value = decode(record(*images), DecodeParameters())
    return value


def run(
    operation: Any, samples: Sequence[Value], model: Value = MODEL, **parameters: int
) -> list[Value | BadRecordError]:
    ends: list[Value | BadRecordError] = operation(samples, [model] * len(samples), ModelParameters(**parameters))
    return ends


def vectors(end: Value | BadRecordError) -> npt.NDArray[np.float32]:
    assert isinstance(end, Value)
    shape = (end.data["images"], end.data["dimensions"])
    return np.frombuffer(end.blobs[end.data["vectors"]].data, dtype="<f4").reshape(shape)


def test_captions_name_most_digits_and_come_in_the_order_of_the_samples() -> None:
    _, labels = load_scans()
    ends = run(caption_cpu, [decoded(scan(2 * at), scan(2 * at + 1, px=24)) for at in range(40)], images_max=7)
    read = [end.data["captions"] for end in ends if isinstance(end, Value)]
    right = [
        text == f"The digit {labels[2 * at + place]}."
        for at, pair in enumerate(read)
        for place, text in enumerate(pair)
    ]
    assert len(right) == 80
    assert sum(right) > 64


def test_vectors_do_not_depend_on_the_batches_and_like_digits_are_near() -> None:
    _, labels = load_scans()
    samples = [decoded(scan(at)) for at in range(60)]
    at_once = np.concatenate([vectors(end) for end in run(embed_cpu, samples, images_max=64)])
    one_by_one = np.concatenate([vectors(end) for end in run(embed_cpu, samples, images_max=1)])
    assert at_once.shape == (60, 12)
    assert np.allclose(at_once, one_by_one, atol=1e-4)
    distances = ((at_once[:, None] - at_once[None]) ** 2).sum(axis=2) + np.eye(60) * 1e9
    assert (labels[distances.argmin(axis=1)] == labels[:60]).mean() > 0.7


@given(st.lists(st.integers(1, 1000), max_size=40), st.integers(1, 9), st.integers(1, 3000))
def test_batches_hold_every_image_once_within_both_limits(pixels: list[int], images_max: int, pixels_max: int) -> None:
    batches = list(plan_batches(pixels, images_max=images_max, pixels_max=pixels_max))
    assert sorted(place for batch in batches for place in batch) == list(range(len(pixels)))
    for batch in batches:
        assert len(batch) <= images_max
        assert len(batch) == 1 or max(pixels[place] for place in batch) * len(batch) <= pixels_max
    # No two neighbours could be one: that would be a batch too many.
    for one, other in itertools.pairwise(batches):
        assert len(one) == images_max or max(pixels[place] for place in one) * (len(one) + 1) > pixels_max, other


def test_a_batch_that_runs_out_of_memory_is_halved() -> None:
    digit_models.SIZES.clear()
    model = model_value(FACTORY, {"dimensions": 12, "memory_images": 3})
    ends = run(embed_cpu, [decoded(scan(at)) for at in range(8)], model, images_max=8)
    assert all(isinstance(end, Value) for end in ends)
    assert digit_models.SIZES == [8, 4, 2, 2, 4, 2, 2]
    none = model_value(FACTORY, {"dimensions": 12, "memory_images": 0})
    with pytest.raises(MemoryError, match="on one image of"):
        run(embed_cpu, [decoded(scan(0))], none)


def test_a_vector_that_is_not_finite_costs_its_own_sample() -> None:
    marked = scan(1)
    marked.putpixel((0, 0), 7)
    ends = run(embed_cpu, [decoded(scan(0)), decoded(scan(2), marked), decoded(), decoded(scan(3))])
    assert [getattr(end, "rule", None) for end in ends] == [None, "model-output", None, None]
    assert isinstance(ends[2], Value)
    assert ends[2].data == {"vectors": None, "images": 0, "dimensions": 0}


def test_a_model_that_can_not_be_imported_and_two_models_at_once_are_refused() -> None:
    with pytest.raises(InvalidConfigError, match="nowhere:at_all"):
        run(embed_cpu, [decoded(scan(0))], model_value("nowhere:at_all"))
    with pytest.raises(InvalidConfigError, match="different models"):
        embed_cpu([decoded(scan(0))] * 2, [MODEL, model_value(FACTORY)], ModelParameters())


def test_operations_for_gpu_and_cpu_are_declared_alike() -> None:
    for name in ("caption", "embed"):
        on_gpu, on_cpu = find_operation(name), find_operation(f"{name}-cpu")
        assert (on_gpu.device, on_cpu.device) == ("gpu", "cpu")
        assert (on_gpu.inputs, on_gpu.batch) == (on_cpu.inputs, on_cpu.batch)


@pytest.mark.slow
def test_in_a_sandbox_an_image_that_the_model_refuses_costs_its_own_sample() -> None:
    steps = [
        SandboxStep(name="decode", operation="decode", inputs=("record",)),
        SandboxStep(name="embed", operation="embed-cpu", inputs=("decode", "model")),
    ]
    records = [record(scan(at, px=13 if at == 4 else 32)) for at in range(10)]
    with Sandbox(steps, shared={"model": MODEL}) as chain:
        outcomes = list(
            chain.run(SampleTask(key=f"{at}", values={"record": value}) for at, value in enumerate(records))
        )
    ends = {outcome.key: outcome.steps[-1] for outcome in outcomes}
    assert len(ends) == 10
    assert {key for key, end in ends.items() if not isinstance(end, StepMade)} == {"4"}
    assert isinstance(ends["4"], StepVerdict)
    assert (ends["4"].rule, ends["4"].message) == ("operation", "embed-cpu failed: ValueError: unlucky size")
