"""Reads TensorBoard's event files by the formats' definitions, without a line of the writer."""

from __future__ import annotations

import dataclasses
import struct
from pathlib import Path
from typing import Any


@dataclasses.dataclass
class Event:
    at_s: float
    step: int
    values: dict[str, float]
    texts: dict[str, str]
    plugins: dict[str, tuple[str, bytes]]
    version: str
    starts: bool


def crc32c(data: bytes) -> int:
    """Castagnoli's, bit by bit."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ 0x82F63B78 if crc % 2 else crc >> 1
    return crc ^ 0xFFFFFFFF


def masked(data: bytes) -> int:
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) % 2**32 + 0xA282EAD8) % 2**32


def message(data: bytes) -> dict[int, list[Any]]:
    """Fields of a protocol buffer by number."""
    found: dict[int, list[Any]] = {}
    at = 0

    def varint() -> int:
        nonlocal at
        value, shift = 0, 0
        while True:
            byte = data[at]
            at += 1
            value += (byte % 128) << shift
            shift += 7
            if byte < 128:
                return value

    while at < len(data):
        number, kind = divmod(varint(), 8)
        if kind == 0:
            value: Any = varint()
        elif kind == 1:
            value = struct.unpack("<d", data[at : (at := at + 8)])[0]
        elif kind == 5:
            value = struct.unpack("<f", data[at : (at := at + 4)])[0]
        else:
            assert kind == 2
            length = varint()
            value = data[at : (at := at + length)]
            assert len(value) == length
        found.setdefault(number, []).append(value)
    return found


def read_events(folder: Path) -> list[Event]:
    """Events of the only file of a folder, each checksum checked."""
    (path,) = folder.glob("*tfevents*")
    data, events, at = path.read_bytes(), [], 0
    while at < len(data):
        length, crc = struct.unpack("<QI", data[at : at + 12])
        assert crc == masked(data[at : at + 8])
        body = data[at + 12 : at + 12 + length]
        assert struct.unpack("<I", data[at + 12 + length : at + 16 + length])[0] == masked(body)
        at += 16 + length
        events.append(_event(message(body)))
    return events


def _event(fields: dict[int, list[Any]]) -> Event:
    values: dict[str, float] = {}
    texts: dict[str, str] = {}
    plugins: dict[str, tuple[str, bytes]] = {}
    for value in message(fields.get(5, [b""])[0]).get(1, []):
        parts = message(value)
        name = parts[1][0].decode()
        if 2 in parts:
            values[name] = parts[2][0]
        if 8 in parts:
            tensor = message(parts[8][0])
            assert tensor[1] == [7]  # DT_STRING
            texts[name] = tensor[8][0].decode()
        if 9 in parts:
            plugin = message(message(parts[9][0])[1][0])
            plugins[name] = plugin[1][0].decode(), plugin[2][0]
    return Event(
        at_s=fields[1][0],
        step=fields[2][0],
        values=values,
        texts=texts,
        plugins=plugins,
        version=fields.get(3, [b""])[0].decode(),
        starts=7 in fields and message(fields[7][0])[1] == [1],
    )
