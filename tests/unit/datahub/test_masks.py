"""Masks are shown over the images of a step, changed as these are, and change nothing that ranks read."""

from __future__ import annotations

import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from polyreme.report.preview_page import build_preview
from polyreme_api.job.data import Augment
from polyreme_api.store import ObjectNotFoundError
from polyreme_datahub import hub
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.inspect.preview import OPACITY, Picture, PreviewPack, draw_mask, preview
from polyreme_datahub.loader.open import open_tokenizer
from polyreme_datahub.loader.sample.augment import Visit, draw_change, settings_of
from polyreme_datahub.loader.sample.pixels import move_labels, unchanged
from polyreme_datahub.tokenizer_file import TokenText
from tests.unit.datahub.jobs import Home, make_spec, record, write_jsonl

pytestmark = pytest.mark.slow

GEOMETRY = {"crop": {"minAreaPercent": 50}, "scale": {"minPercent": 60}, "mirror": {"probability": "0.5"}}
SIZE = (84, 56)
BOX = (50, 10, 74, 30)
RECORDS = 8


def png(image: Image.Image) -> bytes:
    buffer = io.BytesIO()
    image.save(buffer, "PNG")
    return buffer.getvalue()


def painted(mode: str, value: int | tuple[int, ...], ground: int | tuple[int, ...]) -> Image.Image:
    image = Image.new(mode, SIZE, ground)
    ImageDraw.Draw(image).rectangle((BOX[0], BOX[1], BOX[2] - 1, BOX[3] - 1), fill=value)
    return image


def write_masked(folder: Path) -> Path:
    """Records with one masked image; of the last the mask is missing, and one has two images."""
    folder.mkdir()
    records: list[dict[str, Any]] = []
    for at in range(RECORDS):
        (folder / f"{at}.png").write_bytes(png(painted("RGB", (250, 250, 250), (40 + at, 40, 40))))
        (folder / f"{at}-mask.png").write_bytes(png(painted("L", 1 + at % 3, 0)))
        masks = {"masks": [f"{at}-mask.png"]} if at < RECORDS - 1 else {}
        shapes = {"boxes": [{"image": 0, "box": list(BOX), "label": "lamp"}]}
        records.append(record(f"r{at}", [f"{at}.png"], **masks, **shapes))
    records.append(record("two", ["0.png", "1.png"], masks=[None, "1-mask.png"]))
    return write_jsonl(folder, records)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    home = Home(tmp_path / "home")
    home.folder.mkdir()
    home.register("masked", write_masked(tmp_path / "data"))
    return home


def packs_of(home: Home, spec: Any, steps: int) -> Iterator[PreviewPack]:
    source = job_packs.open_source(home.objects, spec, job="uid")
    text = TokenText(open_tokenizer(home.objects, spec, job="uid").content)

    def masks(samples: Any) -> Any:
        return hub.read_masks(home.registry, home.objects, samples)

    for step in range(1, steps + 1):
        yield from preview(source, text, step, first=0, count=source.packs_in(step), masks=masks)


def test_a_mask_is_drawn_over_its_image_wherever_the_image_went(home: Home) -> None:
    spec = make_spec(["masked"], augment=GEOMETRY, sequence_tokens=128)
    home.process(spec, "uid")
    changes, seen = set(), set()
    packs = list(packs_of(home, spec, 6))
    for document in (document for pack in packs for document in pack.documents):
        pictures = [part for part in document.parts if isinstance(part, Picture)]
        seen.add(document.sample_id)
        assert [bool(picture.mask) for picture in pictures] == {
            f"r{RECORDS - 1}": [False],
            "two": [False, True],
        }.get(document.sample_id, [True])
        for picture in pictures:
            if not picture.mask or not picture.shapes:
                continue
            mask = np.asarray(Image.open(io.BytesIO(picture.mask)))
            assert mask.shape == (picture.height, picture.width, 4)
            assert set(np.unique(mask[..., 3]).tolist()) == {0, OPACITY}
            rows, columns = np.nonzero(mask[..., 3])
            left, top, right, bottom = picture.shapes[0]["box"]
            middle = np.array([columns.mean() + 0.5, rows.mean() + 0.5])
            assert np.abs(middle - [(left + right) / 2, (top + bottom) / 2]).max() <= 1.0
            changes.add(picture.change)
    assert len(seen) == RECORDS + 1
    assert len(changes) > 3
    page = build_preview("masked", packs, of_packs=len(packs))
    assert page.count('class="mask"') == sum(
        bool(part.mask) for pack in packs for each in pack.documents for part in each.parts if isinstance(part, Picture)
    )


def test_a_mask_that_is_gone_is_named(home: Home) -> None:
    spec = make_spec(["masked"])
    home.process(spec, "uid")
    names = [("masked@1", "r0"), ("masked@1", f"r{RECORDS - 1}"), ("masked@1", "nobody")]
    found = hub.read_masks(home.registry, home.objects, names)
    assert list(found) == [("masked@1", "r0")]
    for file in (home.folder / "objects").rglob("*"):
        if file.is_file():
            file.unlink()
    with pytest.raises(ObjectNotFoundError):
        hub.read_masks(home.registry, home.objects, names)


@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_labels_are_picked_and_never_mixed(mode: str) -> None:
    settings = settings_of(Augment.model_validate(GEOMETRY))
    assert settings is not None
    value, ground = (7, 0) if mode == "L" else ((200, 30, 90), (0, 0, 0))
    mask = painted(mode, value, ground)
    known = {value, ground} if mode == "RGB" else {(7,), (0,)}
    for number in range(30):
        visit = Visit(settings=settings, seed=1, source="s", sample_id="r", number=number)
        labels = move_labels(mask, draw_change(visit, 0, SIZE, BOX, geometry=True, mirror=True))
        assert {tuple(each) for each in labels.reshape(SIZE[0] * SIZE[1], -1).tolist()} == known
    drawn = np.asarray(Image.open(io.BytesIO(draw_mask(mask, unchanged(*SIZE)))))
    assert np.array_equal(drawn[..., 3] > 0, np.asarray(mask.convert("L")) > 0)
