"""Small ICC profiles, built here: the library makes none but sRGB."""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence

D50 = (0.9642, 1.0, 0.8249)
ADOBE_RGB = ((0.6097, 0.3111, 0.0195), (0.2053, 0.6257, 0.0609), (0.1492, 0.0632, 0.7446))


def rgb_profile(primaries: Sequence[Sequence[float]] = ADOBE_RGB, *, gamma: float = 2.2) -> bytes:
    """A profile by primaries and one gamma."""
    curve = gamma_curve(gamma)
    columns = {name: xyz(color) for name, color in zip((b"rXYZ", b"gXYZ", b"bXYZ"), primaries, strict=True)}
    curves = dict.fromkeys((b"rTRC", b"gTRC", b"bTRC"), curve)
    return profile(b"mntr", b"RGB ", b"XYZ ", {b"wtpt": xyz(D50), **columns, **curves})


def gray_profile(*, gamma: float) -> bytes:
    """A profile of gray by one gamma."""
    return profile(b"mntr", b"GRAY", b"XYZ ", {b"wtpt": xyz(D50), b"kTRC": gamma_curve(gamma)})


def cmyk_profile(lab: Mapping[tuple[int, int, int, int], tuple[int, int, int]]) -> bytes:
    """A profile by the Lab bytes of the sixteen full inks; what is not given is black."""
    identity = bytes(range(256))
    corners = [(c, m, y, k) for c in (0, 1) for m in (0, 1) for y in (0, 1) for k in (0, 1)]
    colors = b"".join(bytes(lab.get(corner, (0, 128, 128))) for corner in corners)
    matrix = struct.pack(">9i", *(65536 * (at % 4 == 0) for at in range(9)))
    table = b"mft1" + bytes(4) + bytes((4, 3, 2, 0)) + matrix + identity * 4 + colors + identity * 3
    return profile(b"prtr", b"CMYK", b"Lab ", {b"wtpt": xyz(D50), b"A2B0": table})


def profile(kind: bytes, colors: bytes, space: bytes, tags: Mapping[bytes, bytes]) -> bytes:
    """Lay out a version 2 profile."""
    tags = {b"desc": b"desc" + struct.pack(">II", 0, 5) + b"test\0" + bytes(78), b"cprt": b"text\0\0\0\0-\0", **tags}
    place = 128 + 4 + 12 * len(tags)
    listing, body = b"", b""
    for name, data in tags.items():
        listing += name + struct.pack(">II", place + len(body), len(data))
        body += data + bytes(-len(data) % 4)
    size = place + len(body)
    head = struct.pack(">I4sI4s4s4s", size, b"lcms", 0x02400000, kind, colors, space) + bytes(12) + b"acsp" + bytes(28)
    head += struct.pack(">3i", *(round(value * 65536) for value in D50))
    return head + bytes(128 - len(head)) + struct.pack(">I", len(tags)) + listing + body


def xyz(values: Sequence[float]) -> bytes:
    return b"XYZ " + bytes(4) + struct.pack(">3i", *(round(value * 65536) for value in values))


def gamma_curve(gamma: float) -> bytes:
    return b"curv" + bytes(4) + struct.pack(">IH", 1, round(gamma * 256))
