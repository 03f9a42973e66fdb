"""TensorBoard's event files: records with masked CRC-32C, each an ``Event`` of a step.

Written here because tensorboardX needs protobuf, and torch's writer the tensorboard package: four nested messages don't
warrant a dependency.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping

HEADER_BYTES = 12
TRAILER_BYTES = 4
_MASK = 0xFFFFFFFF
_VARINT, _DOUBLE, _BYTES, _FLOAT = 0, 1, 2, 5


def record(data: bytes) -> bytes:
    """Frame one record: length, its checksum, data, their checksum."""
    length = struct.pack("<Q", len(data))
    return length + struct.pack("<I", _masked_crc(length)) + data + struct.pack("<I", _masked_crc(data))


def records(data: bytes) -> Iterator[tuple[int, bytes]]:
    """Yield the end and the data of each whole record; what was torn by a crash is none."""
    at = 0
    while at + HEADER_BYTES <= len(data):
        length, crc = struct.unpack_from("<QI", data, at)
        end = at + HEADER_BYTES + length + TRAILER_BYTES
        if crc != _masked_crc(data[at : at + 8]) or end > len(data):
            return
        yield end, data[at + HEADER_BYTES : end - TRAILER_BYTES]
        at = end


def event(
    at_s: float, step: int, *, version: str = "", values: tuple[bytes, ...] = (), restarts: bool = False
) -> bytes:
    """Return an ``Event``: the version of the file, values, or the mark that a session restarted before this step."""
    data = _field(1, _DOUBLE, struct.pack("<d", at_s)) + _number(2, step)
    if version:
        data += _bytes(3, version.encode())
    if values:
        data += _bytes(5, b"".join(_bytes(1, value) for value in values))
    return data + (_bytes(7, _number(1, 1)) if restarts else b"")


def scalar(name: str, value: float) -> bytes:
    """Return a ``Summary.Value`` of a number."""
    try:
        number = struct.pack("<f", value)
    except OverflowError:
        number = struct.pack("<f", float("inf") if value > 0 else float("-inf"))
    return _bytes(1, name.encode()) + _field(2, _FLOAT, number)


def text(name: str, words: str) -> bytes:
    """Return a ``Summary.Value`` for the text page, which reads Markdown."""
    string_type = 7
    tensor = _number(1, string_type) + _bytes(2, b"") + _bytes(8, words.encode())
    return _bytes(1, name.encode()) + _bytes(8, tensor) + _plugin("text", b"")


def session(run: str, started_s: float, parameters: Mapping[str, str | int | float | bool]) -> bytes:
    """Return a ``Summary.Value`` for the page of hyper-parameters."""
    entries = b"".join(_bytes(1, _bytes(1, name.encode()) + _bytes(2, _value(of))) for name, of in parameters.items())
    started = entries + _bytes(4, run.encode()) + _field(5, _DOUBLE, struct.pack("<d", started_s))
    return _bytes(1, b"_hparams_/session_start_info") + _plugin("hparams", _bytes(3, started))


def read_values(data: bytes) -> Iterator[tuple[int, str, str | float]]:
    """Yield step, name, and text or number of each value of an ``Event``."""
    parts = list(_fields(data))
    step = next((value for number, value in parts if number == 2 and isinstance(value, int)), 0)
    for number, summary in parts:
        if number == 5 and isinstance(summary, bytes):
            for _, value in _fields(summary):
                assert isinstance(value, bytes)
                inner = dict(_fields(value))
                yield step, bytes(inner[1]).decode(), _read_value(inner)


def _read_value(value: Mapping[int, int | bytes]) -> str | float:
    if 2 in value:
        return float(struct.unpack("<f", bytes(value[2]))[0])
    return bytes(dict(_fields(bytes(value.get(8, b"")))).get(8, b"")).decode()


def _plugin(name: str, content: bytes) -> bytes:
    return _bytes(9, _bytes(1, _bytes(1, name.encode()) + _bytes(2, content)))


def _value(of: str | float | bool) -> bytes:
    """Return a ``google.protobuf.Value``."""
    if isinstance(of, bool):
        return _number(4, int(of))
    return _bytes(3, of.encode()) if isinstance(of, str) else _field(2, _DOUBLE, struct.pack("<d", of))


def _field(number: int, kind: int, data: bytes) -> bytes:
    return _varint(number << 3 | kind) + data


def _number(number: int, value: int) -> bytes:
    return _field(number, _VARINT, _varint(value))


def _bytes(number: int, data: bytes) -> bytes:
    return _field(number, _BYTES, _varint(len(data)) + data)


def _varint(value: int) -> bytes:
    data = bytearray()
    while value > 0x7F:
        data.append(value & 0x7F | 0x80)
        value >>= 7
    data.append(value)
    return bytes(data)


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        value |= (data[at] & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if data[at - 1] < 0x80:
            return value, at


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Yield the number and the value of each field of a message that ``event`` wrote."""
    at = 0
    while at < len(data):
        key, at = _read_varint(data, at)
        if key & 7 == _VARINT:
            value, at = _read_varint(data, at)
            yield key >> 3, value
            continue
        length = {_DOUBLE: 8, _FLOAT: 4}.get(key & 7)
        if length is None:
            length, at = _read_varint(data, at)
        yield key >> 3, data[at : at + length]
        at += length


def _table() -> tuple[int, ...]:
    rows = []
    for byte in range(256):
        crc = byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
        rows.append(crc)
    return tuple(rows)


_TABLE = _table()


def _masked_crc(data: bytes) -> int:
    crc = _MASK
    for byte in data:
        crc = _TABLE[(crc ^ byte) & 0xFF] ^ crc >> 8
    crc ^= _MASK
    return (crc >> 15 | crc << 17) + 0xA282EAD8 & _MASK
