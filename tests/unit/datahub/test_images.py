"""Images from files: upright, resized to whole tokens, with boxes and masks that follow."""

from __future__ import annotations

import dataclasses
import io
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from polyreme_api.errors import RefusedError
from polyreme_datahub.digests import canonical_json, digest_bytes
from polyreme_datahub.errors import BadRecordError
from polyreme_datahub.index.format import parse_plan, plan_key, seal_plan
from polyreme_datahub.job_data import plan_data
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.sample.pixels import change_pixels, least_size, unchanged
from polyreme_datahub.objects import open_store
from polyreme_datahub.operations.decode_images import DecodeParameters, decode
from polyreme_datahub.operations.fit_pages import ComposeParameters, compose, fitting_size
from polyreme_datahub.operations.images import open_upright
from polyreme_datahub.operations.open_rules import OpenRules
from polyreme_datahub.operations.values import Blob, Value
from tests.unit.datahub.jobs import Home, make_spec, picture, record, write_jsonl

PARAMETERS = ComposeParameters(patch_px=14, merge=2, image_tokens_max=30)


def make(image: bytes, boxes: list[dict[str, object]]) -> tuple[Value, Value]:
    """Decode and compose a record of one image."""
    content = {"kind": "images", "images": [digest_bytes(image)], "masks": [None], "boxes": boxes}
    decoded = decode(Value.of(content, kept=[Blob(image)]), DecodeParameters())
    return decoded, compose(decoded, PARAMETERS)


@pytest.mark.parametrize("orientation", range(1, 9))
def test_every_exif_orientation_is_turned_upright(orientation: int) -> None:
    corner = {1: (0, 0), 2: (0, 1), 3: (1, 1), 4: (1, 0), 5: (0, 0), 6: (0, 1), 7: (1, 1), 8: (1, 0)}[orientation]
    image = open_upright(picture(80, 40, orientation=orientation))
    assert image.size == ((80, 40) if orientation < 5 else (40, 80))
    assert image.getexif().get(0x0112, 1) == 1
    pixels = np.asarray(image).mean(axis=2)
    halves = [np.array_split(half, 2, axis=1) for half in np.array_split(pixels, 2, axis=0)]
    brightest = max(((r, c) for r in range(2) for c in range(2)), key=lambda at: halves[at[0]][at[1]].mean())
    assert brightest == corner


@pytest.mark.parametrize("size", [(1, 1), (27, 29), (84, 84), (500, 300), (300, 5000), (4000, 3000), (56, 1600)])
def test_a_page_is_whole_tokens_and_few_enough(size: tuple[int, int]) -> None:
    try:
        width, height = fitting_size(*size, PARAMETERS)
    except BadRecordError:
        assert max(size) / min(size) > 28
        return
    assert width % 28 == 0 == height % 28
    assert 1 <= width * height // 784 <= PARAMETERS.image_tokens_max


def test_boxes_follow_the_resize_in_display_space() -> None:
    decoded, made = make(picture(112, 56, orientation=6), [{"image": 0, "box": [0, 0, 28, 56], "label": "a"}])
    facts = decoded.data["images"]
    assert facts == [{"digest": facts[0]["digest"], "width": 56, "height": 112, "mask": None}]
    assert made.data["boxes"] == [{"image": 0, "box": [0.0, 0.0, 28.0, 56.0], "label": "a"}]


def painted(width: int, height: int, corner: tuple[int, int], side: int, orientation: int) -> bytes:
    """A dark picture as a camera stores it, that shows a bright square at ``corner`` once it is turned upright."""
    upright = np.full((height, width), 20, dtype=np.uint8)
    upright[corner[1] : corner[1] + side, corner[0] : corner[0] + side] = 250
    stored = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.T,
        6: upright.T[::-1],
        7: upright.T[::-1, ::-1],
        8: upright.T[:, ::-1],
    }[orientation]
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(stored)).save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("size", [(100, 60), (400, 230), (61, 200)])
def test_a_box_lies_around_its_marker_after_turn_and_resize(size: tuple[int, int], orientation: int) -> None:
    left, top, side = size[0] // 2, size[1] // 4, 24
    box = {"image": 0, "box": [left, top, left + side, top + side], "label": "marker"}
    _, made = make(painted(*size, (left, top), side, orientation), [box])
    shown = made.data["pages"][0]
    image = painted(*size, (left, top), side, orientation)
    opened = Blob(image).pixels(OpenRules(**shown["open"]))
    pixels = change_pixels(opened, unchanged(shown["width"], shown["height"]))
    page = np.asarray(Image.fromarray(pixels).convert("L"))
    assert page.shape == (shown["height"], shown["width"])
    rows, columns = np.nonzero(page > 135)
    seen = [columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]
    assert np.abs(np.array(seen) - np.array(made.data["boxes"][0]["box"])).max() <= 1.0


@pytest.mark.slow
def test_coloured_pictures_of_many_sizes_are_packed(tmp_path: Path) -> None:
    folder = tmp_path / "set"
    folder.mkdir()
    records = []
    for number, (width, height) in enumerate([(30, 30), (200, 120), (640, 480), (90, 300)]):
        (folder / f"{number}.jpg").write_bytes(picture(width, height, kind="JPEG", seed=number))
        records.append(record(f"r{number}", [f"{number}.jpg"]))
    (folder / "0.txt").write_text("A picture.", "utf-8")
    home = Home(tmp_path / "home")
    home.register("mine", write_jsonl(folder, records))
    home.register("folder", folder)
    job = make_spec(["mine", "folder"], sequence_tokens=128)
    report = home.process(job)
    assert [part.samples for part in report.datasets] == [4, 1]
    assert [letter.rule for letter in report.datasets[1].dead_letters] == ["file"] * 3
    batch = job_packs.open_source(home.objects, job).packs(1, first=0, count=4)
    patches = np.asarray(batch.patches_PC).reshape(-1, 3, 196)
    assert not np.array_equal(patches[:, 0], patches[:, 1])
    source = job_packs.open_source(home.objects, job)
    seen = {name for step in range(1, 9) for name in source.packs(step, first=0, count=4).sample_ids}
    assert seen == {"r0", "r1", "r2", "r3", "0.jpg"}


@pytest.mark.parametrize("orientation", [1, 3, 6, 8])
def test_a_large_jpeg_is_decoded_at_a_smaller_scale_and_makes_nearly_the_same_page(orientation: int) -> None:
    smooth = Image.effect_noise((40, 30), 80).resize((1008, 752), Image.Resampling.BICUBIC).convert("RGB")
    exif, buffer = Image.Exif(), io.BytesIO()
    exif[0x0112] = orientation
    smooth.save(buffer, "JPEG", quality=95, exif=exif)
    upright = smooth.size if orientation < 5 else smooth.size[::-1]
    page = unchanged(*((140, 112) if orientation < 5 else (112, 140)))
    whole, small = (open_upright(buffer.getvalue(), least=least) for least in (None, least_size(page)))
    assert whole.size == upright
    assert small.size == tuple(side // 2 for side in upright), "a quarter would be less than two pixels for one"
    differences = change_pixels(whole, page).astype(int) - change_pixels(small, page)
    assert np.abs(differences).max() <= 3
    window = dataclasses.replace(page, window=(0.0, 0.0, page.width / 3, page.height / 3))
    assert open_upright(buffer.getvalue(), least=least_size(window)).size == upright, "a third of it needs all pixels"


def test_a_job_that_began_on_an_earlier_release_keeps_its_pixels(tmp_path: Path) -> None:
    home = Home(tmp_path)
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "photo.png").write_bytes(picture(200, 150, seed=1))
    home.register("photos", write_jsonl(tmp_path / "set", [record(f"r{at}", ["photo.png"]) for at in range(8)]))
    job = make_spec(["photos"], sequence_tokens=96)
    home.process(job)
    newer = job_packs.open_source(home.objects, job)
    store, key = open_store(home.objects), plan_key("", plan_data(job))
    plan = parse_plan(store.get(key), key)
    assert plan.pop("pixels") == 2
    store.put(key, canonical_json(seal_plan(plan)))
    for _ in range(2):
        older = job_packs.open_source(home.objects, job)
        ours, theirs = (np.asarray(of.packs(1, first=0, count=1).patches_PC) for of in (older, newer))
        assert not np.array_equal(ours, theirs)
        with pytest.raises(RefusedError, match="loader state belongs to other data"):
            newer.check_state(older.state(1))
        home.process(job)  # the second time it was processed again
    store.put(key, canonical_json(seal_plan({**plan, "pixels": 3})))
    with pytest.raises(RefusedError, match="of a newer release: 3"):
        job_packs.open_source(home.objects, job)
