"""The declared operations of the training path make what the stages made before them, bit for bit."""

from __future__ import annotations

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.write import patches_of
from polyreme_datahub.operations.compose import Compose
from polyreme_datahub.operations.decode import Decode
from polyreme_datahub.operations.decode_images import DecodeParameters, decode
from polyreme_datahub.operations.encode_text import TokenizeParameters, tokenize
from polyreme_datahub.operations.fit_pages import ComposeParameters, compose
from polyreme_datahub.operations.tokenize import Tokenize
from polyreme_datahub.operations.types import ImageParameters, Operation, Work
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.registry.work import SampleRow
from polyreme_datahub.sources.digits import DigitsSource, describe
from polyreme_datahub.tokens import TextTokenizer, train_tokenizer
from tests.unit.datahub.jobs import picture

OLD = ImageParameters(patch_px=14, merge=2, image_tokens_max=30)
NEW = ComposeParameters(patch_px=14, merge=2, image_tokens_max=30)
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


def run_old(stage: Operation, inputs: list[bytes], blobs: dict[str, bytes]) -> tuple[dict[str, Any], dict[str, bytes]]:
    digests = tuple(digest_bytes(data) for data in inputs)
    row = SampleRow(ordinal=0, sample_id="s", record=digests[0])
    result = stage.compute(Work(row=row, key="k", inputs=digests), {**dict(zip(digests, inputs, strict=True)), **blobs})
    return json.loads(result.output), {digest_bytes(part): part for part in result.parts}


@pytest.mark.parametrize("name", RECORDS)
def test_facts_geometry_pixels_and_tokens_are_those_of_the_stages(name: str) -> None:
    record = RECORDS[name]()
    blobs = {digest: blob.data for digest, blob in record.blobs.items()}
    facts, _ = run_old(Decode(), [record.encoded()], blobs)
    decoded = decode(record, DecodeParameters())
    assert decoded.data == facts
    assert set(decoded.blobs) == set(blobs)
    assert not decoded.new

    pages, pngs = run_old(Compose(OLD), [decoded.encoded(), record.encoded()], blobs)
    composed = compose(decoded, NEW)
    assert composed.data["boxes"] == pages["boxes"]
    for old, page in zip(pages["pages"], composed.data["pages"], strict=True):
        assert (page["height"], page["width"]) == (old["height"], old["width"])
        for digest, seen in ((old["png"], page), (old["mask"], page["mask"])):
            if digest is None:
                assert seen is None
                continue
            with Image.open(io.BytesIO(pngs[digest])) as png:
                assert seen["channels"] == (1 if png.mode == "L" else 3)
                expected = patches_of(png, patch_px=14, channels=seen["channels"])
            stored = np.frombuffer(composed.blobs[seen["patches"]].data, dtype=np.uint8)
            assert np.array_equal(stored.reshape(expected.shape), expected)
    assert composed.new == set(composed.blobs)

    file = train_tokenizer({"What is it? A picture. 0123456789": 9}, vocabulary=300)
    old_tokens, _ = run_old(
        Tokenize(TextTokenizer(file), digest="d", parameters=OLD), [record.encoded(), json.dumps(pages).encode()], {}
    )
    shared = Value.of({"tokenizer": digest_bytes(file)}, kept=[Blob(file)])
    assert tokenize(record, composed, shared, TokenizeParameters(token_px=28)).data == old_tokens


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
