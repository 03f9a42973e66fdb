"""Locations of weights: a folder of this machine, whose files are mapped, or objects under one root, read by ranges.

Only the rows of a slice are read from an object, at most ``READ_BYTES_MAX`` at a time; for a slice of some columns all
of its rows. safetensors has no checksums: the bytes that the store returns are not verified.
"""

from __future__ import annotations

import contextlib
import json
import math
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from polyreme_api.store import ObjectStore

READ_BYTES_MAX = 64 << 20
"""Bytes that are asked of a store at a time."""
HEADER_BYTES_MAX = 100_000_000
"""Longest header that the format allows (huggingface.co/docs/safetensors, "Format")."""
_LENGTH_BYTES = 8
_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
    "F8_E4M3": torch.float8_e4m3fn,
    "I32": torch.int32,
}


class BadFileError(ValueError):
    """An object is not a whole safetensors file."""


class Slice(Protocol):
    """A stored tensor that can be sliced: rows, or rows and columns."""

    def get_dtype(self) -> str: ...  # noqa: D102
    def get_shape(self) -> list[int]: ...  # noqa: D102
    def __getitem__(self, index: Any) -> Tensor: ...


class Opened(Protocol):
    """An open file, with the interface of ``safetensors.safe_open``."""

    def keys(self) -> Iterable[str]: ...  # noqa: D102
    def get_slice(self, name: str) -> Slice: ...  # noqa: D102
    def get_tensor(self, name: str) -> Tensor: ...  # noqa: D102


class Folder(Protocol):
    """A set of files of weights; its text is their location."""

    def exists(self) -> bool:
        """Return whether the location exists; a store has no empty ones."""
        ...

    def named(self, file: str) -> str:
        """Return a file's path or URL for messages."""
        ...

    def size_bytes(self, file: str) -> int | None:
        """Return a file's size, or None if it does not exist."""
        ...

    def read(self, file: str) -> bytes:
        """Read a small file."""
        ...

    def opened(self, file: str) -> contextlib.AbstractContextManager[Opened]:
        """Open a file of tensors.

        Raises:
            BadFileError: If it is not a safetensors file; the library raises an error of its own.
        """
        ...


class LocalFolder:
    """A folder of this machine."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __str__(self) -> str:
        """Return its path."""
        return str(self._path)

    def exists(self) -> bool:
        """Return whether it is a folder."""
        return self._path.is_dir()

    def named(self, file: str) -> str:
        """Return a file's path."""
        return str(self._path / file)

    def size_bytes(self, file: str) -> int | None:
        """Return a file's size."""
        path = self._path / file
        return path.stat().st_size if path.is_file() else None

    def read(self, file: str) -> bytes:
        """Read a file."""
        return (self._path / file).read_bytes()

    def opened(self, file: str) -> contextlib.AbstractContextManager[Opened]:
        """Map a file."""
        opened: contextlib.AbstractContextManager[Opened] = safe_open(self._path / file, framework="pt")
        return opened


class StoredFolder:
    """Objects directly under the root of a store."""

    def __init__(self, store: ObjectStore, url: str) -> None:
        """Open a store.

        Args:
            store: Where keys are names of files.
            url: Its root, for messages.
        """
        self._store = store
        self._url = url.rstrip("/")
        self._sizes: dict[str, int] | None = None
        self._files: dict[str, _StoredFile] = {}

    def __str__(self) -> str:
        """Return its URL."""
        return self._url

    def exists(self) -> bool:
        """Return whether it holds any object."""
        return bool(self._listed())

    def named(self, file: str) -> str:
        """Return a file's URL."""
        return f"{self._url}/{file}"

    def size_bytes(self, file: str) -> int | None:
        """Return an object's size, as it was when the store was first listed."""
        return self._listed().get(file)

    def read(self, file: str) -> bytes:
        """Read an object."""
        return self._store.get(file)

    @contextlib.contextmanager
    def opened(self, file: str) -> Iterator[Opened]:
        """Read an object's header, once."""
        if file not in self._files:
            self._files[file] = _StoredFile(self._store, file, self._listed().get(file, 0))
        yield self._files[file]

    def _listed(self) -> Mapping[str, int]:
        if self._sizes is None:
            self._sizes = {info.key: info.size_bytes for info in self._store.list("") if "/" not in info.key}
        return self._sizes


class _StoredFile:
    """Tensors of an object."""

    def __init__(self, store: ObjectStore, key: str, size_bytes: int) -> None:
        self._store, self._key = store, key
        length = int.from_bytes(self.bytes_from(0, min(_LENGTH_BYTES, size_bytes)), "little")
        if size_bytes < _LENGTH_BYTES or not 0 < length <= min(HEADER_BYTES_MAX, size_bytes - _LENGTH_BYTES):
            raise BadFileError(f"its header would have {length} bytes")
        self._begin = _LENGTH_BYTES + length
        try:
            header = json.loads(self.bytes_from(_LENGTH_BYTES, length))
            header.pop("__metadata__", None)
            self._tensors = {name: _StoredSlice(self, self._begin, **_entry(of)) for name, of in header.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise BadFileError(f"its header can't be read: {error}") from error
        end = self._begin
        for part in sorted(self._tensors.values(), key=lambda part: (part.begin, part.end)):
            if part.begin != end:
                raise BadFileError(
                    f"its tensors are not contiguous: after byte {end} the next one begins at {part.begin}"
                )
            end = part.end
        if end != size_bytes:
            raise BadFileError(f"its tensors end at byte {end}")

    def keys(self) -> Iterable[str]:
        return self._tensors

    def get_slice(self, name: str) -> Slice:
        return self._tensors[name]

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name][:]

    def bytes_from(self, begin: int, length: int) -> bytearray:
        """Read a range; a store may return less at the end of an object that was replaced meanwhile."""
        data = bytearray()
        while len(data) < length:
            asked = min(READ_BYTES_MAX, length - len(data))
            got = self._store.get_range(self._key, start=begin + len(data), length=asked)
            if len(got) != asked:
                raise BadFileError(f"bytes from {begin + len(data)}: got {len(got)} of {asked}")
            data += got
        return data


class _StoredSlice:
    """One tensor of an object."""

    def __init__(self, file: _StoredFile, origin: int, *, dtype: str, shape: list[int], begin: int, end: int) -> None:
        self._file, self._dtype, self._shape = file, dtype, shape
        self.begin, self.end = origin + begin, origin + end
        width = _DTYPES[dtype].itemsize if dtype in _DTYPES else None
        if width is not None and end - begin != width * math.prod(shape):
            raise ValueError(f"{dtype} {shape} has {end - begin} bytes")

    def get_dtype(self) -> str:
        return self._dtype

    def get_shape(self) -> list[int]:
        return self._shape

    def __getitem__(self, index: Any) -> Tensor:
        rows, *columns = index if isinstance(index, tuple) else (index,)
        first, end, _ = rows.indices(self._shape[0])
        dtype = _DTYPES[self._dtype]
        row_bytes = dtype.itemsize * math.prod(self._shape[1:])
        count = max(0, end - first)
        if not count * row_bytes:
            return torch.empty((count, *self._shape[1:]), dtype=dtype)[(slice(None), *columns)]
        data = self._file.bytes_from(self.begin + first * row_bytes, count * row_bytes)
        whole = torch.frombuffer(data, dtype=dtype).view(count, *self._shape[1:])
        return whole[(slice(None), *columns)]


def _entry(of: Mapping[str, Any]) -> dict[str, Any]:
    begin, end = map(int, of["data_offsets"])
    return {"dtype": str(of["dtype"]), "shape": [int(size) for size in of["shape"]], "begin": begin, "end": end}


def folder_at(place: Path | Folder) -> Folder:
    """Return the location of a path, or of a place in a bucket."""
    return LocalFolder(place) if isinstance(place, Path) else place
