"""Synthetic photographs by a seed: clouds of several scales and some hard edges, as JPEGs of about 60 KB."""

import json
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw

FOLDER = Path(__file__).parents[2] / "build/photos"
"""Photographs are kept here for the next run."""
WIDTH, HEIGHT = 1088, 816
QUALITY = 74
CLOUDS = ((4, 0.0), (16, 0.4), (64, 0.3), (256, 0.12))
"""Cells across, and how much each cloud covers those before it."""
EDGES = 12


def make_photo(seed: int) -> Image.Image:
    """Draw one photograph."""
    generator = np.random.default_rng(seed)
    image = Image.new("RGB", (WIDTH, HEIGHT))
    for cells, share in CLOUDS:
        noise = generator.integers(0, 256, (cells * HEIGHT // WIDTH, cells, 3), dtype=np.uint8)
        cloud = Image.fromarray(noise).resize((WIDTH, HEIGHT), Image.Resampling.BILINEAR)
        image = Image.blend(image, cloud, share) if share else cloud
    draw = ImageDraw.Draw(image)
    for _ in range(EDGES):
        left, top = (int(value) for value in generator.integers(0, HEIGHT - 40, 2))
        width, height = (int(value) for value in generator.integers(20, 300, 2))
        red, green, blue = (int(value) for value in generator.integers(0, 256, 3))
        shape = draw.ellipse if generator.random() < 0.5 else draw.rectangle
        shape((left, top, left + width, top + height), fill=(red, green, blue))
    return image


def write_photos(folder: Path, count: int) -> Path:
    """Write photographs and a JSON Lines file that lists them; those that are there are kept. Return the file."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        path = folder / f"{number:06d}.jpg"
        if not path.exists():
            make_photo(number).save(path, quality=QUALITY)
        turns = [{"role": "user", "content": "Describe the image."}, {"role": "assistant", "content": f"{number}"}]
        lines.append(json.dumps({"id": path.stem, "images": [path.name], "conversations": turns}))
    listing = folder / f"photos-{count}.jsonl"
    listing.write_text("\n".join(lines) + "\n")
    return listing
