"""The operations of the training path make the same facts, patches and tokens with every release, bit for bit."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.format import BY_CONVOLUTION, BY_PILLOW
from polyreme_datahub.index.sample_bytes import check_of, sample_bytes
from polyreme_datahub.index.tar_shards import SampleFiles, members_of
from polyreme_datahub.loader.sample.image_patches import image_patches
from polyreme_datahub.loader.sample.pixels import cut_patches
from polyreme_datahub.loader.sample.reader import SampleReader, StoredSample
from polyreme_datahub.operations.decode_images import DecodeParameters, decode
from polyreme_datahub.operations.encode_text import TokenizeParameters, tokenize
from polyreme_datahub.operations.fit_pages import ComposeParameters, compose
from polyreme_datahub.operations.images import open_upright
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sources.digits import DigitsSource, describe
from polyreme_datahub.tokens import train_tokenizer
from tests.unit.datahub.jobs import picture

NEW = ComposeParameters(patch_px=14, merge=2, image_tokens_max=30)
ON_RECORD: dict[str, list[str]] = {
    "jpeg": ["2d1c6736abad23d5", "a05d9294f05e90cc", "6677e087ff98ec62"],
    "turned": ["5824569143d98155", "e6e69677fbfc7d86", "6677e087ff98ec62"],
    "gray jpeg": ["88e7553f07d95f7b", "b77e710a8193944d", "a192e3c159cc879d"],
    "transparent": ["ef77d80b1ad9dfd9", "81be7e3c06e24671", "ec0a24a3c6b19acb"],
    "mask": ["0376dcd5cb022b04", "6f9d91d299e60474", "e6fb8c0629dcb6c4"],
    "digits": ["968c2b849daab914", "d7b6761fa06e27df", "b836217c0640c29f"],
}
"""Digests of what decode, compose and tokenize make."""
TOKENIZER = train_tokenizer({"What is it? A picture. 0123456789": 9}, vocabulary=300)
TURNS = [{"role": "user", "content": "What is <image>?"}, {"role": "assistant", "content": "A picture."}]


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, kind, **options)
    return buffer.getvalue()


def gray(width: int, height: int) -> Image.Image:
    return Image.open(io.BytesIO(picture(width, height))).convert("L")


def images_record(image: bytes, mask: bytes | None = None) -> Value:
    blobs = [Blob(data) for data in (image, mask) if data is not None]
    content = {
        "id": "s",
        "kind": "images",
        "images": [blobs[0].digest],
        "masks": [None if mask is None else blobs[1].digest],
        "boxes": [{"image": 0, "box": [0, 1, 20, 25.5], "label": "a"}],
        "conversations": TURNS,
    }
    return Value.of(content, kept=blobs)


def digits_record() -> Value:
    return Value.of(DigitsSource(describe(digits=5, pages=4, seed=1, heldout=False)).read(3).content)


RECORDS = {
    "jpeg": lambda: images_record(picture(300, 200)),
    "turned": lambda: images_record(picture(301, 203, orientation=6)),
    "gray jpeg": lambda: images_record(encoded(gray(123, 77), "JPEG")),
    "transparent": lambda: images_record(encoded(gray(90, 90).convert("RGBA"), "PNG")),
    "mask": lambda: images_record(picture(200, 100), encoded(gray(200, 100), "PNG")),
    "digits": digits_record,
}


@pytest.mark.parametrize("name", RECORDS)
def test_facts_patches_and_tokens_are_those_on_record(name: str) -> None:
    """As values of the releases that kept patches and tokens: what a sample's encoded bytes give has not changed."""
    record = RECORDS[name]()
    decoded = decode(record, DecodeParameters())
    assert set(decoded.blobs) == set(record.blobs)
    assert not decoded.new
    composed = compose(decoded, NEW)
    assert not composed.new
    shared = Value.of({"tokenizer": digest_bytes(TOKENIZER)}, kept=[Blob(TOKENIZER)])
    planned = tokenize(record, composed, shared, TokenizeParameters(token_px=28)).data
    sample = read_back(record, composed, BY_PILLOW)
    assert (len(sample.tokens_T), check_of(sample.tokens_T, sample.learned_T)) == (planned["tokens"], planned["check"])
    made = Value.of(kept_before(record, composed, sample))
    encoded = Value.of(
        {
            "tokens": sample.tokens_T.tolist(),
            "learned": ranges(sample.learned_T),
            **{name: planned[name] for name in ("prompt", "question", "expected")},
        }
    )
    assert [value.digest[:16] for value in (decoded, made, encoded)] == ON_RECORD[name]


@pytest.mark.parametrize("pixel_version", [BY_PILLOW, BY_CONVOLUTION])
@pytest.mark.parametrize("name", ["jpeg", "turned", "gray jpeg", "transparent", "large"])
def test_an_image_in_no_dataset_has_the_patches_of_training(name: str, pixel_version: int) -> None:
    record = images_record(picture(1600, 1200)) if name == "large" else RECORDS[name]()
    sample = read_back(record, compose(decode(record, DecodeParameters()), NEW), pixel_version)
    (image,) = (blob.data for blob in record.blobs.values())
    patches, grid = image_patches(image, NEW, pixel_version=pixel_version)
    assert np.array_equal(patches, sample.patches_P)
    assert grid == tuple(sample.grids_I2[0])
    if name != "large":
        # Decoded already: the same unless training decodes at a smaller scale.
        assert np.array_equal(patches, image_patches(open_upright(image), NEW, pixel_version=pixel_version)[0])


def read_back(record: Value, composed: Value, pixel_version: int) -> StoredSample:
    """Store a sample and read it."""
    images = {digest: blob.data for digest, blob in record.blobs.items()}
    members = members_of(SampleFiles(key="0", files=sample_bytes(record.data, composed.data["pages"], images)))
    data = b"".join(header + body + bytes(-len(body) % 512) for _, header, body in members)
    grids = np.array([[page["height"] // 14, page["width"] // 14] for page in composed.data["pages"]], np.int32)
    reader = SampleReader(patch_px=14, merge=2, tokenizer=Blob(TOKENIZER), pixel_version=pixel_version)
    return reader.read(data, grids)


def kept_before(record: Value, composed: Value, sample: StoredSample) -> dict[str, Any]:
    """What compose made when it kept patches: gray pages with one channel, masks cut as their images."""
    pages = []
    (page,) = composed.data["pages"]
    height, width = page["height"], page["width"]
    channels = 1
    if "image" in page:
        channels = len(Blob(record.blobs[page["image"]].data).pixels().getbands())
    pages.append(cut_of(sample.patches_P[:, : channels * 196].tobytes(), channels, height, width) | {"mask": None})
    for mask in filter(None, record.data.get("masks", ())):
        nearest = record.blobs[mask].pixels().resize((width, height), Image.Resampling.NEAREST)
        patches = cut_patches(np.asarray(nearest), patch_px=14).tobytes()
        pages[0]["mask"] = cut_of(patches, 1, height, width)
    return {"pages": pages, "boxes": composed.data["boxes"]}


def cut_of(patches: bytes, channels: int, height: int, width: int) -> dict[str, Any]:
    return {"patches": digest_bytes(patches), "channels": channels, "height": height, "width": width}


def ranges(learned_T: Any) -> list[list[int]]:
    """Half-open ranges of ones."""
    edges = np.flatnonzero(np.diff(np.concatenate([[0], learned_T.astype(np.int8), [0]])))
    return [list(map(int, pair)) for pair in edges.reshape(-1, 2)]


def test_one_chain_decodes_an_image_once(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[object] = []
    load = Image.open
    record = images_record(picture(300, 200))

    def counting(*args: Any, **options: Any) -> Image.Image:
        opened.append(args)
        return load(*args, **options)

    monkeypatch.setattr(Image, "open", counting)
    compose(decode(record, DecodeParameters()), NEW)
    assert len(opened) == 1


@pytest.mark.parametrize(
    ("image", "mask", "rule"),
    [
        (b"no image", None, "image-format"),
        (encoded(Image.new("L", (3, 9)), "PNG"), None, "image-size"),
        (encoded(Image.new("L", (9, 9)), "PNG"), b"no image", "mask"),
        (encoded(Image.new("L", (9, 9)), "PNG"), encoded(Image.new("L", (9, 8)), "PNG"), "mask"),
    ],
)
def test_an_image_or_mask_that_breaks_a_rule_is_refused(image: bytes, mask: bytes | None, rule: str) -> None:
    with pytest.raises(BadRecordError) as refused:
        decode(images_record(image, mask), DecodeParameters())
    assert refused.value.rule == rule
