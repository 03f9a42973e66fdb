"""A JPEG without what says nothing of its pixels: metadata segments, and bytes between the segments of its header.

libjpeg reports its first warning and no other one. Where that is about a header, damage after it would go unnoticed:
such a file is decoded once more from these bytes. Form of segments: ITU-T T.81, annex B; what libjpeg reads of JFIF's
and Adobe's segments, and how it looks for the next marker: its jdmarker.c.
"""

from __future__ import annotations

from collections.abc import Iterator

SOI, EOI, SOS, COM, EXIF = 0xD8, 0xD9, 0xDA, 0xFE, 0xE1
JFIF, ADOBE = 0xE0, 0xEE
APPLICATION = range(0xE0, 0xF0)
FRAMES = frozenset(range(0xC0, 0xD0)) - {0xC4, 0xC8, 0xCC}
"""Markers of a frame header: SOF0 to SOF15."""
SEQUENTIAL = frozenset({0xC0, 0xC1})
ALONE = frozenset({0x01, *range(0xD0, 0xD8)})
"""Markers without a segment."""
PLAIN_JFIF = b"JFIF\0\x01\x01\0\0\x01\0\x01\0\0"
"""Of version 1.1. That it is there says how colors are coded; the rest is about printing."""
JFIF_BYTES_MIN, ADOBE_BYTES_MIN = 14, 12
"""Shorter ones are passed over."""
WHOLE_SCAN = b"\0\x3f\0"
"""What a scan header of a sequential JPEG ends with."""
TRANSFORMS = {3: (0, 1), 4: (0, 2)}
"""Adobe's color transforms by count of components; for another one, libjpeg takes the last with a warning."""


def without_metadata(data: bytes, *, exif: bool = False) -> bytes:
    """Return a JPEG's bytes with a header of what its pixels need; the same bytes where no scan follows a header.

    Args:
        data: The bytes.
        exif: Whether EXIF is kept, which says how the image is turned.
    """
    segments = list(_segments(data))
    if not segments or segments[-1][0] != SOS:
        return data
    frame = next(((marker, payload) for marker, payload, _ in segments if marker in FRAMES), (0, b""))
    components = frame[1][5] if len(frame[1]) > 5 else 0
    parts = [b"\xff\xd8"]
    for marker, payload, _ in segments:
        kept = _kept(marker, payload, sequential=frame[0] in SEQUENTIAL, components=components)
        if exif and marker == EXIF and payload.startswith(b"Exif\0\0"):
            kept = payload
        if kept is not None:
            parts += [bytes((0xFF, marker)), (len(kept) + 2).to_bytes(2, "big"), kept]
    return b"".join([*parts, data[segments[-1][2] :]])


def _segments(data: bytes) -> Iterator[tuple[int, bytes, int]]:
    """Yield marker, content and end of each segment up to the first scan header."""
    at = 2
    while (at := data.find(b"\xff", at)) >= 0:
        marker_at = at + 1
        while data[marker_at : marker_at + 1] == b"\xff":
            marker_at += 1
        marker = data[marker_at] if marker_at < len(data) else EOI
        at = marker_at + 1
        if marker == 0 or marker in ALONE:
            continue
        size = int.from_bytes(data[at : at + 2], "big")
        if marker in {SOI, EOI} or size < 2 or at + size > len(data):
            return
        yield marker, data[at + 2 : at + size], at + size
        if marker == SOS:
            return
        at += size


def _kept(marker: int, payload: bytes, *, sequential: bool, components: int) -> bytes | None:
    """Return what is kept of a segment's content; None: nothing."""
    if marker == JFIF and payload.startswith(b"JFIF\0") and len(payload) >= JFIF_BYTES_MIN:
        return PLAIN_JFIF
    if marker == ADOBE and payload.startswith(b"Adobe") and len(payload) >= ADOBE_BYTES_MIN:
        known = TRANSFORMS.get(components, (payload[11],))
        return payload[:11] + bytes((payload[11] if payload[11] in known else known[-1],))
    if marker in APPLICATION or marker == COM:
        return None
    return payload[:-3] + WHOLE_SCAN if marker == SOS and sequential else payload
