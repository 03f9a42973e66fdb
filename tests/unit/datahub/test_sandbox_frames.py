"""Frames of a sandbox: whole ones arrive, others are refused before their bytes are read; answers are checked."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyreme_datahub.digests import digest_bytes
from polyreme_datahub.operations.values import Blob, Value
from polyreme_datahub.sandbox.frames import HEADER_BYTES_MAX, MAGIC, PREFIX, Frame, FrameError, encode_frame, read_frame
from polyreme_datahub.sandbox.outcomes import read_outcomes
from polyreme_datahub.sandbox.process import ChildEnded


def read(data: bytes, *, bytes_max: int = 1000, piece: int = 7) -> Frame:
    reader = read_frame(bytes_max=bytes_max)
    needed = next(reader)
    while True:
        part, data = data[:needed], data[needed:]
        assert len(part) == needed, "asked for more than there is"
        try:
            needed = reader.send([part[at : at + piece] for at in range(0, len(part), piece)])
        except StopIteration as end:
            frame: Frame = end.value
            return frame


def test_a_frame_arrives_as_it_was_sent() -> None:
    blobs = {"a": b"", "b": bytes(range(200)), "c": b"x"}
    assert read(b"".join(encode_frame({"é": [1, None]}, blobs))) == ({"é": [1, None]}, blobs)


def framed(head: Any, body: bytes, *, body_bytes: int | None = None) -> bytes:
    raw = head if isinstance(head, bytes) else json.dumps(head).encode()
    return PREFIX.pack(MAGIC, len(raw), len(body) if body_bytes is None else body_bytes) + raw + body


@pytest.mark.parametrize(
    "data",
    [
        PREFIX.pack(b"PK\3\4", 2, 0) + b"{}",
        PREFIX.pack(MAGIC, HEADER_BYTES_MAX + 1, 0),
        PREFIX.pack(MAGIC, 2, 1001),
        framed(b"{", b""),
        framed([], b""),
        framed({}, b""),
        framed({"blobs": [["a", 3]]}, b"ab"),
        framed({"blobs": [["a", -1], ["b", 3]]}, b"ab"),
        framed({"blobs": [["a", 1], ["a", 1]]}, b"ab"),
        framed({"blobs": [["a", True]]}, b"a"),
        framed({"blobs": [["a"]]}, b"a"),
    ],
)
def test_what_is_no_frame_is_refused(data: bytes) -> None:
    with pytest.raises(FrameError):
        read(data)


MADE = b"made"
GOOD = {"key": "k", "steps": [{"step": "a", "data": {}, "new": [digest_bytes(MADE)], "kept": [digest_bytes(b"in")]}]}


def answered(outcomes: Any, blobs: dict[str, bytes] | None = None) -> Any:
    known = [{"record": Value.of({}, kept=[Blob(b"in")])}]
    frame = ({"outcomes": outcomes}, {digest_bytes(MADE): MADE} if blobs is None else blobs)
    return read_outcomes(frame, ["k"], known, [["a"]])


def test_a_good_answer_is_read() -> None:
    (outcome,), unforeseen, outside = answered([GOOD])
    assert outcome.steps[0].value.new == {digest_bytes(MADE)}
    assert (unforeseen, outside) == ({}, False)


@pytest.mark.parametrize(
    ("outcomes", "blobs"),
    [
        ([GOOD], {digest_bytes(MADE): b"other"}),
        ([GOOD], {}),
        ([], None),
        ([GOOD, GOOD], None),
        ([{**GOOD, "key": "other"}], None),
        ([{"key": "k", "steps": []}], None),
        ([{"key": "k", "steps": [{**GOOD["steps"][0], "step": "b"}]}], None),  # type: ignore[dict-item]
        ([{"key": "k", "steps": [{**GOOD["steps"][0], "data": []}]}], None),  # type: ignore[dict-item]
        ([{"key": "k", "steps": [{**GOOD["steps"][0], "kept": ["0"]}]}], None),  # type: ignore[dict-item]
        ([{"key": "k", "steps": [{"step": "a", "rule": 3, "message": "m"}]}], None),
        ([{"key": "k", "steps": [{"step": "a"}]}], None),
        ("no list", None),
    ],
)
def test_an_answer_out_of_form_is_not_believed(outcomes: Any, blobs: dict[str, bytes] | None) -> None:
    with pytest.raises(ChildEnded, match="out of form"):
        answered(outcomes, blobs)
