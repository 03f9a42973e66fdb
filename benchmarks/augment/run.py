"""Processor time that each augmentation adds to an image, beside an image without any.

Usage: run.py [--rounds 40]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import simplejpeg
from PIL import Image

from polyreme_api.job.data import Augment
from polyreme_datahub.loader.sample.augment import Visit, draw_change, settings_of, text_rules
from polyreme_datahub.loader.sample.pixels import change_pixels, unchanged
from polyreme_datahub.operations.images import open_upright

PHOTOGRAPH, PAGE = (1000, 704), (504, 350)
"""Width and height of the photograph, and of its page [pixels]."""
OPERATIONS: dict[str, dict[str, Any]] = {
    "crop": {"crop": {"minAreaPercent": 60}},
    "scale": {"scale": {"minPercent": 70}},
    "mirror": {"mirror": {"probability": "1"}},
    "color": {"color": {}},
    "all": {"crop": {"minAreaPercent": 60}, "scale": {}, "mirror": {"probability": "1"}, "color": {}},
}
TEXT = "The quick brown fox jumps over the lazy dog. " * 222
SETTINGS = {
    name: settings
    for name, given in OPERATIONS.items()
    if (settings := settings_of(Augment.model_validate(given))) is not None
}
ADDED_MAX_RATIO = 0.25
"""Most that all operations together may add to decoding and resizing."""


def main() -> int:
    """Measure, and print one line of JSON; 0 when augmentation is cheap enough."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    random = np.random.default_rng(0)
    rough = Image.fromarray(random.integers(0, 256, (44, 63, 3), np.uint8))
    jpeg = simplejpeg.encode_jpeg(np.ascontiguousarray(np.asarray(rough.resize(PHOTOGRAPH))), quality=90)
    image = open_upright(jpeg)
    made: dict[str, Callable[[int], object]] = {
        "decode": lambda _: open_upright(jpeg),
        "resize": lambda _: change_pixels(image, unchanged(*PAGE)),
        "two_passes": lambda at: two_passes(image, at),
        **{name: lambda at, name=name: augmented(image, name, at) for name in OPERATIONS},  # type: ignore[misc]
        "draws": lambda at: [visit("all", at).draw(0, operation) for operation in range(4)],
        "text_of_10_kb": lambda _: text_rules({"conversations": [{"content": TEXT}]}, SETTINGS["all"]),
    }
    taken = {name: [] for name in made}  # type: dict[str, list[float]]
    for at in range(rounds + 1):
        for name, make in made.items():
            start_s = time.process_time()
            make(at)
            if at:
                taken[name].append((time.process_time() - start_s) * 1e3)
    figures = {f"{name}_cpu_ms": round(statistics.mean(each), 3) for name, each in taken.items()}
    plain = figures["decode_cpu_ms"] + figures["resize_cpu_ms"]
    figures["added_ratio"] = round((figures["all_cpu_ms"] - figures["resize_cpu_ms"]) / plain, 3)
    ok = figures["added_ratio"] <= ADDED_MAX_RATIO
    print(json.dumps({"name": "bench-augment", "figures": figures, "bar": {"added_ratio": ADDED_MAX_RATIO}, "ok": ok}))
    return 0 if ok else 1


def visit(name: str, number: int) -> Visit:
    """Return a visit of the one sample."""
    return Visit(settings=SETTINGS[name], seed=0, source="s", sample_id="r", number=number)


def augmented(image: Image.Image, name: str, number: int) -> object:
    """Draw, and make the page."""
    change = draw_change(visit(name, number), 0, PAGE, None, geometry=True, mirror=True)
    return change_pixels(image, change)


def two_passes(image: Image.Image, number: int) -> object:
    """Crop to a page of its own first, then resize: what one resize with a box saves."""
    change = draw_change(visit("crop", number), 0, PAGE, None, geometry=True, mirror=True)
    whole = image.resize(PAGE, Image.Resampling.BICUBIC, reducing_gap=3.0)
    return np.asarray(whole.resize(PAGE, Image.Resampling.BICUBIC, box=change.window))


if __name__ == "__main__":
    raise SystemExit(main())
