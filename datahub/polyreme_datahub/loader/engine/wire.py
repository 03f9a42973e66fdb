"""Messages between the data engine of a pod and its clients: JSON in datagrams, arrays in sealed memory files.

A reply with arrays carries the descriptor of a memory file (memfd), which the client maps privately: nothing is copied,
and what a client writes into its arrays stays its own. Memory files count to the memory of the pod, need no
mounted folder, and are freed by the kernel when the last process that maps them is gone.
"""

from __future__ import annotations

import builtins
import dataclasses
import fcntl
import json
import mmap
import os
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from polyreme_api import errors as api_errors
from polyreme_api.batch import PackedBatch
from polyreme_api.errors import PolyremeError
from polyreme_datahub import errors as datahub_errors
from polyreme_datahub.loader.sample.documents import LaidPacks
from polyreme_datahub.loader.sample.mapped_index import SampleDamagedError

MESSAGE_BYTES_MAX = 1 << 17
"""Longest message; less than a socket's send buffer takes at once."""
ALIGNMENT = 64
BATCH_ARRAYS = ("tokens_T", "targets_T", "positions_T", "document_offsets", "grids_I2", "patches_PC")
"""In the order of the file: patches are last, so that a client without use for them maps what is before."""

Values = npt.NDArray[Any]
Layout = Sequence[tuple[str, Sequence[int], int]]
"""Type, shape and first byte of each array."""


class SharedArrays:
    """Arrays in a sealed memory file, which is closed with the last reference.

    Args:
        arrays: Each as its parts along the first axis, at least one.
        facts: Go with the arrays.
    """

    def __init__(self, arrays: Sequence[Sequence[Values]], facts: Mapping[str, Any]) -> None:
        self.facts = dict(facts)
        self.layout, self.size = layout_of(arrays)
        self.descriptor = os.memfd_create("polyreme-packs", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(self.descriptor, self.size)
            for parts, (_, _, start) in zip(arrays, self.layout, strict=True):
                end = start
                for part in parts:
                    end = _write(self.descriptor, np.ascontiguousarray(part), end)
            seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE | fcntl.F_SEAL_SEAL
            fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, seals)
        except BaseException:
            os.close(self.descriptor)
            raise

    def __del__(self) -> None:
        """Close the file; clients keep what they have mapped."""
        if hasattr(self, "descriptor"):
            os.close(self.descriptor)

    @property
    def message(self) -> dict[str, Any]:
        """The reply that goes with the descriptor."""
        return {**self.facts, "layout": self.layout}


def layout_of(arrays: Sequence[Sequence[Values]]) -> tuple[list[tuple[str, list[int], int]], int]:
    """Return the place of each array, given as its parts, in a memory file, and the bytes of the file."""
    layout, end = [], 0
    for parts in arrays:
        layout.append((parts[0].dtype.str, [sum(map(len, parts)), *parts[0].shape[1:]], end))
        end += -(-sum(part.nbytes for part in parts) // ALIGNMENT) * ALIGNMENT
    return layout, max(end, ALIGNMENT)


def mapped(descriptor: int, layout: Layout, *, count: int) -> list[Values]:
    """Map the first ``count`` arrays of a memory file; each may be written to, by this process alone."""
    sizes = [int(np.prod(shape, dtype=np.int64)) for _, shape, _ in layout[:count]]
    ends = [
        start + size * np.dtype(kind).itemsize for (kind, _, start), size in zip(layout[:count], sizes, strict=True)
    ]
    memory = mmap.mmap(descriptor, max(*ends, ALIGNMENT), access=mmap.ACCESS_COPY)
    return [
        np.frombuffer(memory, dtype=kind, count=size, offset=start).reshape(shape)
        for (kind, shape, start), size in zip(layout[:count], sizes, strict=True)
    ]


def share_packs(laid: LaidPacks) -> SharedArrays:
    """Put packs into a memory file, each document's patches by one copy."""
    batch = laid.batch
    arrays = [[np.asarray(getattr(batch, name))] for name in BATCH_ARRAYS[:-1]]
    names = np.frombuffer(json.dumps(list(batch.sample_ids)).encode(), np.uint8)
    return SharedArrays(
        [[names], *arrays, laid.patches],
        {
            "unmasked": int(batch.unmasked_tokens),
            "lost": [int(at) for at in batch.lost_images],
            "padding": [int(at) for at in batch.padding_documents],
        },
    )


def batch_of(message: Mapping[str, Any], descriptor: int, *, pixels: bool) -> PackedBatch:
    """Return the batch of a reply, as views of its memory; without pixels there are no patches."""
    layout = message["layout"]
    found = mapped(descriptor, layout, count=len(layout) - (not pixels))
    if not pixels:
        kind, shape, _ = layout[-1]
        found.append(np.zeros((0, *shape[1:]), np.dtype(kind)))
    names, *arrays = found
    return PackedBatch(
        **dict(zip(BATCH_ARRAYS, arrays, strict=True)),
        sample_ids=json.loads(names.tobytes()),
        unmasked_tokens=message["unmasked"],
        lost_images=message["lost"],
        padding_documents=tuple(message["padding"]),
    )


@dataclasses.dataclass(frozen=True, slots=True)
class Received:
    """A message, and the descriptor that came with it."""

    message: dict[str, Any]
    descriptor: int | None


def send(connection: socket.socket, message: Mapping[str, Any], descriptor: int | None = None) -> None:
    """Send a message.

    Raises:
        OSError: If the other end is gone, or the message is too long.
    """
    socket.send_fds(connection, [json.dumps(message).encode()], [] if descriptor is None else [descriptor])


def receive(connection: socket.socket) -> Received | None:
    """Wait for a message; None at the end of the connection."""
    data, descriptors, _, _ = socket.recv_fds(connection, MESSAGE_BYTES_MAX, 1)
    if not data:
        return None
    return Received(json.loads(data), descriptors[0] if descriptors else None)


_CLASSES: dict[str, type[PolyremeError]] = {
    **{
        name: found
        for module in (datahub_errors, api_errors)
        for name, found in vars(module).items()
        if isinstance(found, type) and issubclass(found, PolyremeError)
    },
    SampleDamagedError.__name__: SampleDamagedError,
}
del _CLASSES[datahub_errors.BadRecordError.__name__]  # Has more arguments, and never reaches a rank.


def describe_error(error: Exception) -> dict[str, Any]:
    """Describe an error, so that ``error_of`` makes its like in another process."""
    if isinstance(error, PolyremeError):
        kind = next(known.__name__ for known in type(error).__mro__ if known.__name__ in _CLASSES)
        return {"error": kind, "message": error.message, "field": error.field}
    if isinstance(error, OSError):
        return {"error": "OSError", "number": error.errno, "message": error.strerror or str(error)}
    return {"error": "PolyremeError", "message": f"the data engine failed: {type(error).__name__}: {error}"}


def error_of(message: Mapping[str, Any]) -> Exception:
    """Make an error out of its description: the same class, message, exit code and field."""
    if message["error"] == "OSError":
        return builtins.OSError(message["number"], message["message"])
    return _CLASSES[message["error"]](message["message"], field=message.get("field"))


def _write(descriptor: int, array: Values, start: int) -> int:
    """Write an array; return where it ends."""
    data = memoryview(array.reshape(-1).view(np.uint8).data)
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], start + done)
    return start + done
