"""Augmentation: the same draws for everybody, lengths as planned, and boxes that stay on what they were around."""

from __future__ import annotations

import hashlib
import io
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageDraw

from polyreme_api import environment as names
from polyreme_api.environment import DATA_THREADS
from polyreme_api.errors import RefusedError
from polyreme_api.job.data import Augment
from polyreme_api.job.spec import TrainingJobSpec
from polyreme_datahub.index.sample_bytes import check_of
from polyreme_datahub.index.shapes import moved_shapes
from polyreme_datahub.loader import job_packs
from polyreme_datahub.loader.engine.client import EngineSource, OpenRequest
from polyreme_datahub.loader.inspect.preview import Picture, preview
from polyreme_datahub.loader.order.balance import StepSplit
from polyreme_datahub.loader.sample.augment import NOTHING_FORBIDDEN, Visit, draw_change, settings_of, text_rules
from polyreme_datahub.loader.sample.pixels import ROWS_AT_ONCE, ImageChange, change_pixels, unchanged
from polyreme_datahub.loader.source import PackedSource
from polyreme_datahub.operations.images import open_upright
from polyreme_datahub.tokenizer_file import TokenText
from polyreme_launcher.data_engine import DataEngine
from tests.unit.datahub.jobs import Home, fix_points, make_spec, picture, write_jsonl

SAMPLES, STEPS, JOB = 12, (1, 2, 3, 7), "uid-1"
EVERYTHING: dict[str, Any] = {
    "crop": {"minAreaPercent": 40, "maxStretchPercent": 20},
    "scale": {"minPercent": 60},
    "mirror": {"probability": "0.5"},
    "color": {"brightnessPercent": 30},
}
BOX = [20.0, 30.0, 60.0, 80.0]


def spec_of(augment: dict[str, Any] | None) -> TrainingJobSpec:
    return make_spec(["mine"], sequence_tokens=160, augment=augment)


def line(at: int) -> dict[str, Any]:
    turns = [
        {"role": "user", "content": "<image>Where is <point:0>?"},
        {"role": "assistant", "content": f"Number {at} is in <box:0>, around <polygon:0>."},
    ]
    return {
        "id": f"r{at}",
        "images": [f"{at}.png"],
        "conversations": turns,
        "boxes": [{"box": BOX, "label": "lamp"}],
        "points": [{"point": [40, 50]}],
        "polygons": [{"polygon": [[20, 30], [60, 30], [40, 80]]}],
    }


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    folder = tmp_path_factory.mktemp("set")
    for at in range(SAMPLES):
        (folder / f"{at}.png").write_bytes(picture(112 + 28 * (at % 3), 112, seed=at))
    home = Home(tmp_path_factory.mktemp("home"))
    home.register("mine", write_jsonl(folder, [line(at) for at in range(SAMPLES)]))
    home.process(spec_of(None), job=JOB)
    assert len(opened(home)._indexes[0]) == SAMPLES
    return home


def opened(home: Home, augment: dict[str, Any] | None = EVERYTHING) -> PackedSource:
    return job_packs.open_source(home.objects, spec_of(augment), job=JOB)


def read(source: Any, steps: Sequence[int] = STEPS, *, each: int = 4) -> list[tuple[bytes, bytes, bytes]]:
    """Tokens, targets and patches of whole steps, asked for by ranks that take ``each`` packs."""
    found = []
    for step in steps:
        batches = [source.packs(step, first=first, count=each) for first in range(0, 4, each)]
        arrays = ([np.asarray(getattr(batch, name)) for batch in batches] for name in ("tokens_T", "targets_T"))
        tokens, targets = (np.concatenate(parts).tobytes() for parts in arrays)
        found.append((tokens, targets, np.concatenate([np.asarray(b.patches_PC) for b in batches]).tobytes()))
    return found


def test_tokens_and_pixels_are_the_same_for_any_ranks_threads_restarts_and_with_an_engine(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(DATA_THREADS, "1")
    alone = opened(home)
    expected = read(alone)
    plain = read(opened(home, None))
    assert all(tokens != before for (tokens, _, _), (before, _, _) in zip(expected, plain, strict=True))
    assert all(len(pixels) == len(before) for (_, _, pixels), (_, _, before) in zip(expected, plain, strict=True))
    again = opened(home)
    again.check_state(alone.state(6))
    assert read(again, [7]) == expected[-1:]
    monkeypatch.setenv(DATA_THREADS, "5")
    threaded = opened(home)
    assert [read(threaded, [step], each=each)[0] for step, each in zip(STEPS, (1, 2, 4, 1), strict=True)] == expected
    images = range(len(threaded.grids(7, first=1, count=1)[0]))
    neighbours = threaded.patches(7, pack=1, images=images)
    np.testing.assert_array_equal(neighbours, np.asarray(alone.packs(7, first=1, count=1).patches_PC))
    path = tmp_path / "job.json"
    job = {"apiVersion": "polyreme.dev/v1alpha1", "kind": "TrainingJob", "metadata": {"name": "t"}}
    spec = spec_of(EVERYTHING).model_dump(mode="json", by_alias=True, exclude_none=True)
    path.write_text(json.dumps({**job, "spec": spec}))
    variables = {
        **os.environ,
        names.OBJECTS_URL: home.objects,
        names.JOB_UID: JOB,
        names.CHECKPOINT_URL: fix_points(tmp_path / "checkpoints"),
    }
    engine = DataEngine(directory=tmp_path, environment=variables)
    engine.begin_attempt()
    try:
        assert engine.descriptor is not None
        asked = OpenRequest(attempt=1, job=str(path), split=StepSplit(data_ranks=2), pixels=True)
        served = EngineSource(engine.descriptor, asked, open_wait_s=10.0, pixels=True)
        assert read(served, each=2) == expected
        served.close()
    finally:
        engine.close()


def test_a_sample_keeps_its_length_changes_at_each_visit_and_its_checksum_is_that_of_the_plan(home: Home) -> None:
    source, plain = opened(home), opened(home, None)._indexes[0]
    index, settings = source._indexes[0], source._documents._how.augment[0]
    assert settings is not None
    seen = set()
    for number in range(6):
        visit = Visit(settings=settings, seed=3, source="s0", sample_id="r4", number=number)
        stored, before = index.read(4, visit), plain.read(4)
        assert (stored.tokens_T.size, stored.patches_P.shape) == (before.tokens_T.size, before.patches_P.shape)
        np.testing.assert_array_equal(stored.learned_T, before.learned_T)
        assert stored.check == before.check == check_of(before.tokens_T, before.learned_T)
        text = TokenText(index._reader._tokenizer.data).decode(stored.tokens_T.tolist())
        assert written(stored.notes[0].shapes, 140, 112) in text
        seen.add((stored.tokens_T.tobytes(), stored.patches_P.tobytes()))
        assert index.read(4, visit).patches_P.tobytes() == stored.patches_P.tobytes()
    assert len(seen) == 6


def written(shapes: Sequence[Any], width: int, height: int) -> str:
    """The box as its text names it, by the arithmetic of the reference page."""
    left, top, right, bottom = next(item["box"] for item in shapes if "box" in item)
    numbers = (left * 1000 // width, top * 1000 // height, right * 1000 // width, bottom * 1000 // height)
    return "[" + ",".join(f"{min(999, int(number)):03d}" for number in numbers) + "]"


def test_other_augmentation_is_other_data_and_no_augmentation_is_the_data_of_before(home: Home) -> None:
    state = opened(home).state(3)
    for other in ({**EVERYTHING, "mirror": {"probability": "0.25"}}, {}, None):
        with pytest.raises(RefusedError, match="loader state belongs to other data"):
            opened(home, other).check_state(state)
    opened(home, {**EVERYTHING, "mirror": {"probability": "0.50"}}).check_state(state)
    opened(home, {}).check_state(opened(home, None).state(3))


def test_a_preview_shows_pixels_shapes_and_changes_of_the_very_step(home: Home) -> None:
    source = opened(home)
    (pack,) = preview(source, TokenText(source._indexes[0]._reader._tokenizer.data), 7, first=1, count=1)
    pictures = [part for document in pack.documents for part in document.parts if isinstance(part, Picture)]
    assert pictures
    patches = np.asarray(source.packs(7, first=1, count=1).patches_PC)
    cut = [np.asarray(Image.open(io.BytesIO(shown.png))) for shown in pictures]
    tiled = [
        image.reshape(image.shape[0] // 14, 14, -1, 14, 3).transpose(0, 2, 4, 1, 3).reshape(-1, 588) for image in cut
    ]
    np.testing.assert_array_equal(np.concatenate(tiled), patches)
    for shown in pictures:
        assert {name for item in shown.shapes for name in item} >= {"box", "point", "polygon"}
        assert "window" in shown.change
    spoken = ["".join(getattr(part, "text", "") for part in document.parts) for document in pack.documents]
    assert all(written(p.shapes, p.width, p.height) in text for p, text in zip(pictures, spoken, strict=True))


def painted(width: int, height: int, box: tuple[int, int, int, int], orientation: int) -> bytes:
    """A dark picture with a bright box, stored so that a viewer which follows EXIF shows it so."""
    image = Image.new("RGB", (width, height), (40, 40, 40))
    ImageDraw.Draw(image).rectangle((box[0], box[1], box[2] - 1, box[3] - 1), fill=(250, 250, 250))
    back = {
        2: Image.Transpose.FLIP_LEFT_RIGHT,
        3: Image.Transpose.ROTATE_180,
        4: Image.Transpose.FLIP_TOP_BOTTOM,
        5: Image.Transpose.TRANSPOSE,
        6: Image.Transpose.ROTATE_90,
        7: Image.Transpose.TRANSVERSE,
        8: Image.Transpose.ROTATE_270,
    }
    stored = image if orientation == 1 else image.transpose(back[orientation])
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    stored.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


@pytest.mark.parametrize("orientation", range(1, 9))
def test_boxes_points_and_polygons_stay_within_a_pixel_of_a_painted_marker_after_any_chain(orientation: int) -> None:
    settings = settings_of(Augment.model_validate(EVERYTHING | {"color": None}))
    assert settings is not None
    width, height, page = 301, 203, (280, 196)
    for number in range(25):
        random = np.random.default_rng([orientation, number])
        left, top = int(random.integers(0, 240)), int(random.integers(0, 150))
        box = (left, top, left + int(random.integers(20, 61)), top + int(random.integers(20, 53)))
        image = open_upright(painted(width, height, box, orientation))
        assert image.size == (width, height)
        right, down = page[0] / width, page[1] / height
        planned = (box[0] * right, box[1] * down, box[2] * right, box[3] * down)
        visit = Visit(settings=settings, seed=orientation, source="s", sample_id="r", number=number)
        change = draw_change(visit, 0, page, planned, geometry=True, mirror=True)
        pixels = change_pixels(image, change)
        assert pixels.shape == (page[1], page[0], 3)
        inner = pixels[change.offset[1] :, change.offset[0] :][: change.inner[1], : change.inner[0], 0]
        rows, columns = np.nonzero(inner > 145)
        seen = np.array([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]) + np.tile(change.offset, 2)
        corners = [(planned[0], planned[1]), (planned[2], planned[1]), (planned[2], planned[3])]
        shapes = {
            "boxes": [{"image": 0, "box": list(planned)}],
            "points": [{"image": 0, "point": corners[0]}],
            "polygons": [{"image": 0, "polygon": corners}],
        }
        moved = moved_shapes(shapes, [change.move])
        assert np.abs(np.array(moved["boxes"][0]["box"]) - seen).max() <= 1.0
        near, far = (seen[2], seen[0]) if change.mirrored else (seen[0], seen[2])
        assert np.abs(np.array(moved["points"][0]["point"]) - [near, seen[1]]).max() <= 1.0
        polygon = np.array([[near, seen[1]], [far, seen[1]], [far, seen[3]]])
        assert np.abs(np.array(moved["polygons"][0]["polygon"]) - polygon).max() <= 1.0
        np.testing.assert_allclose(change.move(corners[2]), one_by_one(change, corners[2]), atol=1e-9)


def one_by_one(change: ImageChange, vertex: tuple[float, float]) -> list[float]:
    """The same chain as matrices of homogeneous coordinates, one of each operation."""
    left, top, right, bottom = change.window
    (inner_width, inner_height), (x, y) = change.inner, change.offset
    crop = np.array([[1, 0, -left], [0, 1, -top], [0, 0, 1]])
    scale = np.diag([inner_width / (right - left), inner_height / (bottom - top), 1])
    mirror = np.array([[-1, 0, inner_width], [0, 1, 0], [0, 0, 1]]) if change.mirrored else np.eye(3)
    place = np.array([[1, 0, x], [0, 1, y], [0, 0, 1]])
    moved: list[float] = (place @ mirror @ scale @ crop @ [*vertex, 1])[:2].tolist()
    return moved


def test_boxes_move_as_torchvision_moves_them() -> None:
    import torch
    from torchvision import tv_tensors
    from torchvision.transforms.v2 import functional

    random = np.random.default_rng(7)
    width, height = 301, 203
    for _ in range(60):
        left, top = int(random.integers(0, 150)), int(random.integers(0, 100))
        right, bottom = int(random.integers(left + 40, width + 1)), int(random.integers(top + 40, height + 1))
        inner = int(random.integers(60, width + 1)), int(random.integers(60, height + 1))
        offset = int(random.integers(0, width - inner[0] + 1)), int(random.integers(0, height - inner[1] + 1))
        change = ImageChange(
            width=width,
            height=height,
            window=(left, top, right, bottom),
            inner=inner,
            offset=offset,
            mirrored=bool(random.integers(0, 2)),
        )
        ends_x, ends_y = np.sort(random.uniform(left, right, 2)), np.sort(random.uniform(top, bottom, 2))
        box = [ends_x[0], ends_y[0], ends_x[1], ends_y[1]]
        theirs = tv_tensors.BoundingBoxes(torch.tensor([box]), format="XYXY", canvas_size=(height, width))
        rest = width - inner[0] - offset[0], height - inner[1] - offset[1]
        theirs = functional.resized_crop(theirs, top, left, bottom - top, right - left, [inner[1], inner[0]])
        theirs = functional.horizontal_flip(theirs) if change.mirrored else theirs
        theirs = functional.pad(theirs, [*offset, *rest])
        [ours] = moved_shapes({"boxes": [{"image": 0, "box": box}]}, [change.move])["boxes"]
        np.testing.assert_allclose(ours["box"], theirs[0].numpy(), atol=1e-4)


def test_draws_are_philox_by_seed_sample_visit_image_and_operation() -> None:
    settings = settings_of(Augment.model_validate(EVERYTHING))
    assert settings is not None
    visit = Visit(settings=settings, seed=7, source="s", sample_id="ü 1", number=5)
    digest = hashlib.blake2b("7:s:ü 1".encode(), digest_size=16, person=b"augment").digest()
    key = [int.from_bytes(digest[at : at + 8], "little") for at in (0, 8)]
    expected = [(word >> 11) / 2**53 for word in philox([1, 5, 2, 3], key)]
    assert list(visit.draw(2, 3)) == expected


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox 4x64 of ten rounds (Salmon and others, 2011), in Python's integers."""
    mask = 2**64 - 1
    for _ in range(10):
        high = [0xD2E7470EE14C6C93 * counter[0], 0xCA5A826395121157 * counter[2]]
        counter = [
            (high[1] >> 64) ^ counter[1] ^ key[0],
            high[1] & mask,
            (high[0] >> 64) ^ counter[3] ^ key[1],
            high[0] & mask,
        ]
        key = [(key[0] + 0x9E3779B97F4A7C15) & mask, (key[1] + 0xBB67AE8584CAA73B) & mask]
    return counter


def test_colors_are_those_of_pillows_matrix_within_a_level_and_gray_stays_gray() -> None:
    settings = settings_of(Augment.model_validate({"color": {"saturationPercent": 60}}))
    assert settings is not None
    height = 2 * ROWS_AT_ONCE + 28
    pixels = np.random.default_rng(0).integers(0, 256, (height, 84, 3), np.uint8)
    for number in range(5):
        visit = Visit(settings=settings, seed=0, source="s", sample_id="r", number=number)
        change = draw_change(visit, 0, (84, height), None, geometry=True, mirror=True)
        assert change.color is not None
        rows, offset = change.color.fixed
        matrix = [value / 2**14 for row in rows for value in (*row, offset)]
        image = Image.fromarray(pixels)
        theirs = np.asarray(image.convert("RGB", tuple(matrix)), np.int64)
        assert np.abs(change_pixels(image, change) - theirs).max() <= 1
        gray = change_pixels(image.convert("L"), change)
        colored = change_pixels(image.convert("L").convert("RGB"), change)
        assert np.abs(colored.astype(np.int64) - gray[..., None]).max() <= 1


@pytest.mark.parametrize(
    ("text", "record", "geometry", "mirror"),
    [
        ("A cup.", {}, True, True),
        ("It is <box:0>.", {}, True, True),
        ("The cup on the left.", {}, True, False),
        ("Bright light.", {}, True, True),
        ("Links oben.", {}, True, False),
        ("左边", {}, True, False),
        ("The cup on the left.", {"mirrorSafe": True}, True, True),
        ("A cup.", {"mirrorSafe": False}, True, False),
        ("At [12, 30, 50.5, 80].", {"mirrorSafe": True}, False, True),
        ("At (0.1,0.2)", {}, False, True),
        ("In <loc0123>", {}, False, True),
        ("x1=3", {}, False, True),
        ("In 2019 (see 3).", {}, True, True),
    ],
)
def test_a_text_with_sides_or_coordinates_forbids_what_would_make_it_wrong(
    text: str, record: dict[str, Any], geometry: bool, mirror: bool
) -> None:
    content = {"conversations": [{"role": "assistant", "content": text}], **record}
    rules = text_rules(content, settings_of(Augment.model_validate(EVERYTHING)))
    assert (not rules.geometry, not (rules.geometry or rules.mirror)) == (geometry, geometry and mirror)
    assert text_rules(content, settings_of(Augment.model_validate({"color": {}}))) == NOTHING_FORBIDDEN


def test_every_known_word_of_orientation_is_found_in_a_sentence() -> None:
    words = (
        "Left leftmost right clockwise counterclockwise East west mirrored starboard links linker rechts rechte gauche "
    )
    words += "droite izquierda derecha sinistra destra esquerda direita слева справа левый 左 右"
    words += " 왼쪽 오른쪽 يسار يمين बाएं दाएं"
    settings = settings_of(Augment.model_validate({"mirror": {}}))
    for word in words.split():
        content = {"conversations": [{"role": "assistant", "content": f"A cup, {word}."}]}
        assert text_rules(content, settings).mirror, word


def test_what_is_forbidden_is_not_drawn_and_what_is_not_set_changes_nothing() -> None:
    settings = settings_of(Augment.model_validate({**EVERYTHING, "mirror": {"probability": "1"}}))
    assert settings is not None
    visit = Visit(settings=settings, seed=0, source="s", sample_id="r", number=0)
    whole = unchanged(56, 28)
    assert draw_change(visit, 0, (56, 28), None, geometry=True, mirror=True).mirrored
    assert not draw_change(visit, 0, (56, 28), None, geometry=True, mirror=False).mirrored
    still = draw_change(visit, 0, (56, 28), None, geometry=False, mirror=True)
    assert (still.window, still.inner, still.mirrored) == (whole.window, whole.inner, False)
    assert still.color is not None
    assert settings_of(Augment()) is settings_of(None) is None
