"""The shipped operations beside the training path: filters, hashes, resize, measure, and statistics."""

from __future__ import annotations

import io
import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageFilter

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.operations.dataset_statistics import DatasetStatistics, Distribution
from polyreme_datahub.operations.decode_images import DecodeParameters, decode
from polyreme_datahub.operations.deduplicate_images import DeduplicateParameters, deduplicate_images
from polyreme_datahub.operations.encode_text import TokenizeParameters, tokenize
from polyreme_datahub.operations.filters import (
    AspectParameters,
    BlurParameters,
    SizeParameters,
    aspect_filter,
    blur_filter,
    size_filter,
)
from polyreme_datahub.operations.fit_pages import ComposeParameters, compose
from polyreme_datahub.operations.image_hash import exact_hash, image_hash, mean_colors, perceptual_hash
from polyreme_datahub.operations.measure import measure
from polyreme_datahub.operations.resize_images import ResizeParameters, fit_within, resize
from polyreme_datahub.operations.values import Blob, Dropped, Value
from polyreme_datahub.tokens import train_tokenizer

TURNS = [{"role": "user", "content": "What is <image>?"}, {"role": "assistant", "content": "A picture."}]


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def photo(width: int, height: int, seed: int = 0) -> Image.Image:
    small = np.random.default_rng(seed).integers(0, 256, (height // 12 + 2, width // 12 + 2, 3), dtype=np.uint8)
    return Image.fromarray(small).resize((width, height), Image.Resampling.NEAREST)


def record(*images: bytes, masks: tuple[bytes | None, ...] = ()) -> Value:
    blobs = [Blob(data) for data in images]
    covers = [None if data is None else Blob(data) for data in (masks or (None,) * len(images))]
    content = {
        "id": "s",
        "kind": "images",
        "images": [blob.digest for blob in blobs],
        "masks": [None if blob is None else blob.digest for blob in covers],
        "boxes": [{"image": 0, "box": [0, 5, 20, 20], "label": "a"}] if images else [],
        "conversations": TURNS,
    }
    return Value.of(content, kept=[*blobs, *(blob for blob in covers if blob is not None)])


def decoded(*images: Image.Image) -> Value:
    value: Value = decode(record(*(encoded(image) for image in images)), DecodeParameters())
    return value


def test_the_size_filter_keeps_both_ends_and_names_the_image_that_it_drops() -> None:
    parameters = SizeParameters(side_px_min=20, side_px_max=100, pixels_min=800, pixels_max=5000)
    for good in ((20, 40), (100, 50)):
        assert size_filter(decoded(photo(*good)), parameters).data == {"images": 1}
    for bad in ((19, 90), (101, 40), (20, 39), (100, 51)):
        with pytest.raises(Dropped, match=f"image 1 is {bad[0]} x {bad[1]} pixels"):
            size_filter(decoded(photo(40, 40), photo(*bad)), parameters)


def test_the_aspect_filter_drops_what_is_too_long_either_way() -> None:
    assert aspect_filter(decoded(photo(80, 20)), AspectParameters(aspect_max=4.0)).data == {"images": 1}
    for bad in ((81, 20), (20, 81)):
        with pytest.raises(Dropped, match="at most 4 to 1"):
            aspect_filter(decoded(photo(*bad)), AspectParameters(aspect_max=4.0))


def test_the_blur_filter_tells_a_sharp_image_from_a_blurred_one_at_any_size() -> None:
    for size in ((200, 150), (1600, 1200)):
        sharp = photo(*size)
        assert blur_filter(decoded(sharp), BlurParameters()).data["sharpness"][0] > 100
        with pytest.raises(Dropped, match="image 0 is blurred"):
            blur_filter(decoded(sharp.filter(ImageFilter.GaussianBlur(size[0] / 40))), BlurParameters())


def test_the_exact_hash_is_of_what_is_shown_and_the_perceptual_one_survives_copying() -> None:
    image = photo(300, 200)
    turned = Image.Exif()
    turned[0x0112] = 6
    shown = encoded(image.transpose(Image.Transpose.ROTATE_90), exif=turned)
    copies = [encoded(image), encoded(image, "WEBP", lossless=True), encoded(image, "TIFF"), shown]
    hashes = image_hash(decode(record(*copies), DecodeParameters())).data["images"]
    assert len({one["exact"] for one in hashes}) == len({one["perceptual"] for one in hashes}) == 1
    worse = [image.resize((150, 100)), Image.open(io.BytesIO(encoded(image, "JPEG", quality=40)))]
    for copy in worse:
        assert exact_hash(copy) != hashes[0]["exact"]
        assert (perceptual_hash(copy) ^ int(hashes[0]["perceptual"], 16)).bit_count() <= 4
    others = [perceptual_hash(photo(300, 200, seed)) for seed in range(1, 30)]
    assert min((other ^ int(hashes[0]["perceptual"], 16)).bit_count() for other in others) > 12
    assert len({one["colors"] for one in hashes}) == 1
    for copy in worse:
        steps = zip(mean_colors(copy), bytes.fromhex(hashes[0]["colors"]), strict=True)
        assert max(abs(one - other) for one, other in steps) <= 4


def test_squares_of_another_color_are_no_copies() -> None:
    pages = []
    for color in ("red", "green", (254, 2, 0)):
        page = Image.new("RGB", (120, 90), "white")
        page.paste(color, (40, 30, 80, 70))
        pages.append(image_hash(decode(record(encoded(page)), DecodeParameters())).data)
    sample = [SimpleNamespace(ordinal=at, sample_id=f"s{at}", inputs=(one,)) for at, one in enumerate(pages)]
    dropped = deduplicate_images(sample, DeduplicateParameters(distance_max=3))
    assert dropped == {2: "its image is within 3 bits, and in color, of that of s0"}


@pytest.mark.parametrize("encoding", ["jpeg", "png", "webp"])
def test_resize_fits_the_square_and_boxes_and_masks_follow(encoding: Any) -> None:
    mask = Image.new("L", (400, 200))
    mask.paste(255, (0, 0, 200, 200))
    source = decode(record(encoded(photo(400, 200)), masks=(encoded(mask),)), DecodeParameters())
    parameters = ResizeParameters(side_px_max=100, encoding=encoding)
    made = resize(source, parameters)
    assert made == resize(source, parameters)
    (image,) = made.data["images"]
    assert (image["width"], image["height"]) == (100, 50)
    with Image.open(io.BytesIO(made.blobs[image["digest"]].data)) as opened:
        assert (opened.format, opened.size) == (encoding.upper(), (100, 50))
    halves = np.asarray(made.blobs[image["mask"]].pixels())
    assert set(np.unique(halves)) == {0, 255}
    assert (halves[:, :50] == 255).all()
    assert made.data["boxes"] == [{"image": 0, "box": [0.0, 1.25, 5.0, 5.0], "label": "a"}]
    assert compose(made, ComposeParameters(patch_px=14, merge=2, image_tokens_max=30)).data["pages"]
    assert fit_within(99, 1, 100) == (99, 1)
    assert fit_within(10_000, 1, 100) == (100, 1)


def test_measure_counts_what_compose_and_tokenize_make() -> None:
    parameters = ComposeParameters(patch_px=14, merge=2, image_tokens_max=30)
    file = train_tokenizer({"What is it? A picture. 0123456789": 9}, vocabulary=300)
    tokenizer = Value.of({"tokenizer": digest_bytes(file)}, kept=[Blob(file)])
    sample = record(encoded(photo(300, 200)))
    facts = decode(sample, DecodeParameters())
    pages = compose(facts, parameters)
    tokens = tokenize(sample, pages, tokenizer, TokenizeParameters(token_px=28)).data
    measured = measure(sample, facts, tokenizer, parameters).data
    assert measured["tokens"] == tokens["tokens"]
    assert measured["patches"] == sum(page["height"] * page["width"] for page in pages.data["pages"]) // (14 * 14)
    assert measured["image_tokens"] * 4 == measured["patches"]
    other = ComposeParameters(patch_px=14, merge=2, image_tokens_max=29)
    assert measure(sample, facts, tokenizer, other).data["vision"] != measured["vision"]


def test_statistics_merged_in_any_order_are_the_same_and_close_to_the_true_quantiles() -> None:
    generator = random.Random(3)
    values = [round(generator.lognormvariate(6, 1.5)) for _ in range(5000)]
    whole = Distribution()
    for value in values:
        whole.add(value)
    parts = [Distribution() for _ in range(7)]
    for value in values:
        generator.choice(parts).add(value)
    generator.shuffle(parts)
    merged = Distribution()
    for part in parts:
        merged.merge(Distribution.from_json(part.to_json()))
    assert merged.to_json() == whole.to_json()
    assert (merged.total, merged.least, merged.largest) == (sum(values), min(values), max(values))
    for share in (0.01, 0.25, 0.5, 0.9, 1.0):
        true = sorted(values)[max(0, -int(-share * len(values) // 1) - 1)]
        seen = merged.quantile(share)
        assert seen is not None
        assert abs(seen - true) <= true / 128
    assert Distribution().quantile(0.5) is None
    assert len(whole.buckets) < 2000


def test_statistics_of_samples() -> None:
    counted = [DatasetStatistics() for _ in range(3)]
    for at, size in enumerate([(100, 50), (30, 60), (80, 80)]):
        sample = record(encoded(photo(*size)))
        counted[at].add(sample.data, decode(sample, DecodeParameters()).data)
    counted[0].merge(counted[1:])
    summary = counted[0].summary()
    assert (summary["samples"], summary["images"], summary["turns"]) == (3, 3, 6)
    assert summary["width_px"]["p50"] == 80
    assert summary["aspect_thousandths"]["largest"] == 2000
    assert summary["text_characters"]["least"] == len("What is <image>?A picture.")
    assert DatasetStatistics.from_json(counted[0].to_json()) == counted[0]
