"""Files of a sealed sample: its record, its images as the last step left them, and the facts of its row. Pure.

The last step whose value has images in the form of ``decode`` or of a record decides; shapes and masks come with them.
Facts are the scalars of the small values of all steps, ``<step>_<field>``; of a list the first one.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from polyreme_datahub.digests import canonical_json
from polyreme_datahub.index.sample_bytes import RECORD_FILE, extension_of
from polyreme_datahub.index.shapes import shapes_of
from polyreme_datahub.index.tar_shards import SampleFiles, Scalar
from polyreme_datahub.recipes.recipe import Step
from polyreme_datahub.runner.walk import Walked

DEPTH_MAX = 4
FIELDS_MAX = 32
"""Facts of one step, by name."""
TEXT_CHARACTERS_MAX = 512
"""Of a fact that is text."""
INT_MAX = 2**63 - 1
MASK = "mask"
BASE: Mapping[str, type] = {
    "height": int,
    "images": int,
    "ordinal": int,
    "sample_id": str,
    "text_length": int,
    "width": int,
}
"""Columns of every manifest: the first image's size, the ordinal in the version that the recipe ran on."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """Images of a sample, by digest."""

    images: tuple[str, ...] = ()
    masks: tuple[str | None, ...] = ()
    shapes: Mapping[str, Sequence[Any]] = dataclasses.field(default_factory=dict)
    """Boxes, points and polygons."""
    size_px: tuple[int, int] | None = None
    """Of the first image."""

    @property
    def blobs(self) -> set[str]:
        """Digests of images and masks."""
        return {*self.images, *(mask for mask in self.masks if mask is not None)}


def image_steps(steps: Sequence[Step]) -> tuple[str, ...]:
    """Return the names of the steps whose values may have images."""
    return tuple(step.name for step in steps if not step.operation.barrier and any(step.operation.reads_blobs))


def pages_of(walked: Walked, steps: Sequence[str]) -> Pages | None:
    """Return the images that the last image-making step left, or None where no step has any."""
    for name in reversed(steps):
        value = walked.values[name]
        if value.data.get("kind") != "images":
            continue
        pages = _pages(value.data)
        if pages.blobs <= set(value.blobs):
            return pages
    return None


def sample_files(
    walked: Walked, record: Mapping[str, Any], pages: Pages | None, blobs: Mapping[str, bytes]
) -> SampleFiles:
    """Build the files and the row of a sample, with its own facts only."""
    content = dict(record)
    if pages is not None:
        content = {name: value for name, value in content.items() if name not in {"document", "page"}}
        content |= {"kind": "images", "images": list(pages.images), "masks": list(pages.masks)}
        content |= {"boxes": [], **pages.shapes}
    else:
        pages = _pages(record) if record.get("kind") == "images" else Pages()
    files = {RECORD_FILE: canonical_json(content)}
    one = len(pages.images) == 1
    for at, (image, mask) in enumerate(zip(pages.images, pages.masks, strict=True)):
        place = "" if one else f"{at}."
        files[f"{place}{extension_of(blobs[image])}"] = blobs[image]
        if mask is not None:
            files[f"{place}{MASK}.{extension_of(blobs[mask])}"] = blobs[mask]
    size_px = pages.size_px or (record.get("width"), record.get("height"))
    return SampleFiles(
        key=f"{walked.ordinal:012d}",
        files=files,
        columns={
            "ordinal": walked.ordinal,
            "sample_id": walked.sample_id,
            "images": len(pages.images),
            "width": size_px[0],
            "height": size_px[1],
            "text_length": sum(len(turn["content"]) for turn in record.get("conversations", ())),
        },
    )


def facts_of(walked: Walked) -> dict[str, Scalar]:
    """Return the facts that the small values of a sample's steps have."""
    found: dict[str, Scalar] = {}
    for step, output in walked.outputs.items():
        if output.value is None:
            continue
        named = dict(_scalars(output.value.data, step.replace("-", "_"), 0))
        found |= {name: named[name] for name in sorted(set(named) - set(BASE))[:FIELDS_MAX]}
    return found


def column_types(facts: Iterable[Mapping[str, Scalar]]) -> dict[str, type]:
    """Return the type of each fact: numbers of two kinds become floats, other kinds text."""
    kinds: dict[str, set[type]] = {}
    for one in facts:
        for name, value in one.items():
            if value is not None:
                kinds.setdefault(name, set()).add(type(value))

    def common(found: set[type]) -> type:
        if len(found) == 1:
            return next(iter(found))
        return float if found <= {int, float} else str

    return {name: common(found) for name, found in kinds.items()}


def as_type(value: Scalar, kind: type) -> Scalar:
    """Return a fact as the type of its column."""
    return None if value is None else kind(value)


def _pages(data: Mapping[str, Any]) -> Pages:
    entries = data.get("images", ())
    if entries and isinstance(entries[0], Mapping):
        images = tuple(entry["digest"] for entry in entries)
        masks = tuple(entry.get("mask") for entry in entries)
        size_px = (entries[0]["width"], entries[0]["height"])
        return Pages(images=images, masks=masks, shapes=shapes_of(data), size_px=size_px)
    masks = tuple(data.get("masks") or [None] * len(entries))
    return Pages(images=tuple(entries), masks=masks, shapes=shapes_of(data))


def _scalars(value: Any, name: str, depth: int) -> Iterator[tuple[str, Scalar]]:
    if depth > DEPTH_MAX:
        return
    if isinstance(value, Mapping):
        for field in sorted(value):
            yield from _scalars(value[field], f"{name}_{field}", depth + 1)
    elif isinstance(value, list):
        if value:
            yield from _scalars(value[0], name, depth + 1)
    elif isinstance(value, str):
        yield name, value[:TEXT_CHARACTERS_MAX]
    elif isinstance(value, int) and not isinstance(value, bool) and abs(value) > INT_MAX:
        yield name, str(value)
    elif isinstance(value, (int, float, bool)):
        yield name, value
