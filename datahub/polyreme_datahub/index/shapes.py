"""Boxes, points and polygons of a sample's images: their fields, how they are moved, how a text names them.

A text that holds ``<box:0>`` shows the coordinates of the sample's first box in that place, and so for ``<point:0>``
and ``<polygon:0>``. They are thousandths of the image's sides, three digits each: ``[012,345,678,999]``. Every digit
is a token of its own, so a moved box is written in as many tokens as before.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from polyreme_datahub.errors import BadRecordError

FIELDS: Mapping[str, str] = {"boxes": "box", "points": "point", "polygons": "polygon"}
"""Fields of a record, and the name of the coordinates in each of their entries."""
MARK = re.compile(r"<(box|point|polygon):(\d{1,6})>")
MARKS_MAX = 1000
"""Marks of one record."""
THOUSANDTHS = 1000
BEYOND = 0.01
"""Share of an image's side by which a shape may lie outside; it is cut off where it is written."""
Vertex = tuple[float, float]
Move = Callable[[Vertex], Vertex]


def shapes_of(data: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the shapes of a record or value, by field; ``boxes`` always, the others where there are any."""
    found = {field: list(data.get(field, ())) for field in FIELDS}
    return {field: items for field, items in found.items() if items or field == "boxes"}


def moved_shapes(shapes: Mapping[str, Sequence[Any]], moves: Sequence[Move]) -> dict[str, list[Any]]:
    """Move each shape as its image is.

    Args:
        shapes: By field.
        moves: By image; they keep the directions of both axes, but may mirror.
    """
    return {field: [_moved(item, FIELDS[field], moves[item["image"]]) for item in shapes[field]] for field in shapes}


def scaled_shapes(shapes: Mapping[str, Sequence[Any]], scales: Sequence[tuple[float, float]]) -> dict[str, list[Any]]:
    """Scale the shapes of each image, to the right and down."""

    def scale(right: float, down: float) -> Move:
        return lambda vertex: (vertex[0] * right, vertex[1] * down)

    return moved_shapes(shapes, [scale(*each) for each in scales])


def vertices_of(item: Mapping[str, Any]) -> list[Vertex]:
    """Return the corners of a shape: two of a box, left top and right bottom; the one of a point."""
    if "box" in item:
        left, top, right, bottom = item["box"]
        return [(left, top), (right, bottom)]
    return [(x, y) for x, y in ([item["point"]] if "point" in item else item["polygon"])]


def check_inside(shapes: Mapping[str, Sequence[Any]], sizes: Sequence[tuple[int, int]]) -> None:
    """Refuse a shape with a corner outside of its image, but for a hundredth of its side (a pixel at least).

    Args:
        shapes: By field.
        sizes: Width and height of each image.

    Raises:
        BadRecordError: Naming the shape.
    """
    for field, items in shapes.items():
        for number, item in enumerate(items):
            width, height = sizes[item["image"]]
            for x, y in vertices_of(item):
                if not (_is_inside(x, width) and _is_inside(y, height)):
                    raise BadRecordError(
                        f"{FIELDS[field]} {number} has the corner ({x:g}, {y:g}), its image is {width} x {height} "
                        "pixels; expected one inside, after the image's EXIF orientation",
                        rule=field,
                    )


def _is_inside(value: float, side: int) -> bool:
    beyond = max(1.0, side * BEYOND)
    return -beyond <= value <= side + beyond


def check_marks(turns: Sequence[Mapping[str, str]], shapes: Mapping[str, Sequence[Any]]) -> None:
    """Refuse a record whose text names shapes that it does not have, or too many; without shapes it names none.

    Raises:
        BadRecordError: Naming the mark.
    """
    if not any(shapes.values()):
        return
    marks = [mark for turn in turns for mark in MARK.finditer(turn["content"])]
    counts = {name: len(shapes.get(field, ())) for field, name in FIELDS.items()}
    for mark in marks:
        if int(mark[2]) >= counts[mark[1]]:
            raise BadRecordError(
                f"conversations: {mark[0]} names no {mark[1]} of this record, which has {counts[mark[1]]}, from 0 on",
                rule="boxes",
            )
    if len(marks) > MARKS_MAX:
        raise BadRecordError(
            f"conversations name {len(marks)} boxes, points and polygons, expected at most {MARKS_MAX}", rule="boxes"
        )


def written_turns(
    turns: Sequence[Mapping[str, str]], shapes: Mapping[str, Sequence[Any]], sizes: Sequence[tuple[int, int]]
) -> Sequence[Mapping[str, str]]:
    """Write the coordinates of shapes in the places where turns name them; without shapes they stay as they are.

    Args:
        turns: They passed ``check_marks``.
        shapes: By field, in pixels of their pages.
        sizes: Width and height of each page.
    """
    if not any(shapes.values()):
        return turns
    by_name = {name: shapes.get(field, ()) for field, name in FIELDS.items()}

    def written(mark: re.Match[str]) -> str:
        item = by_name[mark[1]][int(mark[2])]
        width, height = sizes[item["image"]]
        pairs = [(_thousandth(x, width), _thousandth(y, height)) for x, y in vertices_of(item)]
        return f"[{','.join(f'{value:03d}' for pair in pairs for value in pair)}]"

    return [{**turn, "content": MARK.sub(written, turn["content"])} for turn in turns]


def _thousandth(value: float, side: int) -> int:
    return min(THOUSANDTHS - 1, max(0, int(value * THOUSANDTHS / side)))


def _moved(item: Mapping[str, Any], name: str, move: Move) -> dict[str, Any]:
    moved = [move(vertex) for vertex in vertices_of(item)]
    if name == "point":
        return {**item, name: list(moved[0])}
    if name == "polygon":
        return {**item, name: [list(vertex) for vertex in moved]}
    (left, top), (right, bottom) = moved
    return {**item, name: [min(left, right), min(top, bottom), max(left, right), max(top, bottom)]}
