"""A preview says what a batch holds, token by token, and its page lets nothing of the data act."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence

import numpy as np
import pytest
from PIL import Image

from polyreme.report import preview_page
from polyreme.report.preview_page import build_preview
from polyreme_api.batch import IGNORED_TARGET, PackedBatch, TokenIds
from polyreme_datahub.loader.inspect.preview import Picture, PreviewDocument, PreviewPack, Span, preview
from polyreme_datahub.tokenizer_file import TokenText

MEDIA, END, PAD = 1, 2, 3
SIDE = 14
HOSTILE = "<script>alert(1)</script> \u202e"
TOKENIZER = json.dumps(
    {
        "added_tokens": [{"id": number, "special": True} for number in (MEDIA, END, PAD)],
        "model": {"vocab": {character: 10 + at for at, character in enumerate("abc")}},
    }
).encode()
A, B, C = 10, 11, 12


class OnePack:
    """Two samples: one with two images in a row and an answer of two tokens, one of text alone; then padding."""

    token_ids = TokenIds(media=MEDIA, end=END, pad=PAD)
    tokens = (A, MEDIA, MEDIA, MEDIA, B, C, END, A, B, PAD)
    targets = (*[IGNORED_TARGET] * 4, C, END, IGNORED_TARGET, B, IGNORED_TARGET, IGNORED_TARGET)

    def __init__(self) -> None:
        random = np.random.default_rng(0)
        self.images = [random.integers(0, 255, (2 * SIDE, 2 * at * SIDE, 3), np.uint8) for at in (1, 2)]

    preference_sets = (None,)

    def packs_in(self, _: int) -> int:
        return 1

    def pack_tokens_in(self, _: int) -> int:
        return len(self.tokens)

    def packs(self, _: int, *, first: int, count: int) -> PackedBatch:
        assert (first, count) == (0, 1)
        patches = [
            image.reshape(2, SIDE, -1, SIDE, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 3 * SIDE**2)
            for image in self.images
        ]
        return PackedBatch(
            tokens_T=np.array(self.tokens),
            targets_T=np.array(self.targets),
            positions_T=np.arange(10),
            document_offsets=np.array([0, 7, 9, 10]),
            patches_PC=np.concatenate(patches),
            grids_I2=np.array([[2, 2], [2, 4]]),
            sample_ids=["two pictures", "text"],
            unmasked_tokens=3,
        )

    def grids(self, *_: int, **__: int) -> Sequence[np.ndarray]:
        raise AssertionError

    def pairs(self, *_: int, **__: int) -> np.ndarray:
        raise AssertionError

    def patches(self, *_: int, **__: object) -> np.ndarray:
        raise AssertionError

    def state(self, _: int) -> dict[str, str]:
        raise AssertionError

    def refresh(self) -> None:
        raise AssertionError

    def check_state(self, _: object) -> None:
        raise AssertionError


def test_preview_marks_every_token_as_read_learned_or_image() -> None:
    source = OnePack()
    (pack,) = preview(source, TokenText(TOKENIZER), 1, first=0, count=1)
    first, second = pack.documents
    assert (pack.tokens, pack.tokens_max) == (9, 10)
    read, one, two, asked, answer = first.parts
    assert (read, asked) == (Span(text="a", tokens=1, learned=False), Span(text="b", tokens=1, learned=False))
    assert answer == Span(text="c", tokens=2, learned=True), "the end is learned, and has no text"
    assert (first.tokens, first.learned) == (7, 2)
    for picture, image, tokens in ((one, source.images[0], 1), (two, source.images[1], 2)):
        assert isinstance(picture, Picture)
        assert (picture.height, picture.width, picture.tokens) == (*image.shape[:2], tokens)
        assert np.array_equal(np.asarray(Image.open(io.BytesIO(picture.png))), image)
    assert second.parts == (Span(text="a", tokens=1, learned=False), Span(text="b", tokens=1, learned=True))


def test_the_page_escapes_what_samples_say_and_bounds_its_images(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(preview_page, "PICTURE_BYTES_MAX", 10)
    spans = [Span(text=HOSTILE * 2_000, tokens=1, learned=learned) for learned in (False, True)]
    pictures = [Picture(height=1, width=1, tokens=1, png=b"12345678") for _ in range(2)]
    document = PreviewDocument(sample_id=HOSTILE, tokens=4, learned=1, parts=(*spans, *pictures))
    page = build_preview(HOSTILE, [PreviewPack(number=0, tokens_max=8, documents=(document,))], of_packs=2)
    assert "<script" not in page
    assert "\u202e" not in page
    assert page.count("alert(1)") == 4_003, "no text is left out"
    assert (page.count("<img "), page.count("are not shown")) == (1, 1)
    assert "1 of 2 packs" in page
