"""Read and write the bytes of tensors in objects: raw, by ranges; every block that is read is verified."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, SavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import ReadItem, WriteItem

from polyreme_api.blocks import aligned, first_difference
from polyreme_api.commit_marker import CommitMarker, SavedFile
from polyreme_api.errors import RefusedError
from polyreme_api.store import ObjectNotFoundError, ObjectStore
from polyreme_trainer.checkpoint.index import INDEX_NAME, Piece, by_index, can_hold, read_index, wanted_parts
from polyreme_trainer.rank_page import advance

FILE_BYTES_MAX = 64 << 20
"""Pieces are written together into files of at most this size; a larger piece has a file of its own."""
READ_BYTES_MAX = 64 << 20
"""Neighbouring ranges of a file are read together up to this size."""
READERS = 4
"""Concurrent reads: one stream from a bucket does not fill a network card."""
READ_TRIES_MAX = 2
"""Reads of a range before it counts as damaged: a bit may also flip in transit."""
OPTIMIZER_PREFIX = "optimizer."
"""Prefix of the names of the optimizer's state: ``optimizer.<kind>.<parameter>``."""
_ALIGNMENT = 64


class DamagedError(RefusedError):
    """Files of a committed checkpoint differ from what its marker records."""

    def __init__(self, name: str, damage: Sequence[str]) -> None:
        super().__init__(f"checkpoint is damaged: {name}: {'; '.join(damage)}")
        self.name = name
        self.damage = tuple(damage)


def write_pieces(
    store: ObjectStore, name: str, items: Sequence[WriteItem], planner: SavePlanner, *, rank: int
) -> tuple[dict[str, SavedFile], list[Piece]]:
    """Write the tensors of a plan; when it returns, the files are durable.

    Nothing is copied: the store gets views of the tensors.

    Raises:
        StoreFailedError: If the store does not take a file.
    """
    files: dict[str, SavedFile] = {}
    pieces: list[Piece] = []
    for number, group in enumerate(_groups(items)):
        file = f"{rank:05d}-{number:03d}.bin"
        parts: list[memoryview | bytes] = []
        begin = 0
        for item in group:
            tensor = planner.resolve_data(item)
            if not isinstance(tensor, Tensor):
                raise TypeError(f"a checkpoint holds tensors alone: {item.index.fqn} is none")
            pieces.append(_piece(item, tensor, file, begin))
            data = _bytes_of(tensor)
            gap = -len(data) % _ALIGNMENT
            parts += [data, bytes(gap)]
            begin += len(data) + gap
        files[file] = SavedFile.of_parts(parts)
        store.put(f"{name}/{file}", parts)
        advance()
    return files, pieces


def read_pieces(store: ObjectStore, name: str, marker: CommitMarker, state: dict[str, Tensor]) -> int:
    """Fill tensors in place from a checkpoint, whatever layout saved it; return the bytes that were read.

    Raises:
        DamagedError: If what was read is not what was written, naming file, block, the checksum expected and seen.
        RefusedError: If a tensor is missing, or of another size or type.
        StoreFailedError: If the store stays unavailable.
    """
    reader = _Reader(store=store, name=name, marker=marker)
    pieces = read_index(reader.read(INDEX_NAME, 0, marker.files[INDEX_NAME].size_bytes), name=name)
    _check_names(name, stored={piece.tensor for piece in pieces}, wanted=state.keys())
    try:
        items, planner = wanted_parts(state, pieces)
    except (RuntimeError, ValueError) as error:
        raise RefusedError(f"checkpoint does not fit: {name}: {error}", field="spec.model") from error
    stored = by_index(pieces)
    wanted = sorted((_wanted(item, stored) for item in items), key=lambda part: part.place)
    with concurrent.futures.ThreadPoolExecutor(READERS, thread_name_prefix="read") as executor:
        done = [
            executor.submit(_fill, reader, run, planner)
            for run in _runs(part for part in wanted if part.end > part.begin)
        ]
        return sum(future.result() for future in done)


def _check_names(name: str, *, stored: Collection[str], wanted: Collection[str]) -> None:
    """Refuse a checkpoint that lacks tensors; another optimizer's state is the usual reason.

    Raises:
        RefusedError: Naming what is missing.
    """
    missing = sorted(set(wanted) - set(stored))
    if not missing:
        return
    if all(tensor.startswith(OPTIMIZER_PREFIX) for tensor in missing):
        raise RefusedError(
            f"checkpoint was written with another optimizer: {name} has no {missing[0]}, the first of {len(missing)} "
            "that this run's optimizer needs; resume with the optimizer that wrote it, or start a new run from "
            "exported weights",
            field="spec.training.optimizer.name",
        )
    raise RefusedError(
        f"checkpoint lacks tensors: {name} has no {missing[0]}, the first of {len(missing)} that this run needs",
        field="spec.model",
    )


def verify_files(store: ObjectStore, name: str, marker: CommitMarker) -> None:
    """Read every byte of a checkpoint.

    Raises:
        DamagedError: Naming every file that differs from what the marker records.
        StoreFailedError: If the store stays unavailable.
    """
    reader = _Reader(store=store, name=name, marker=marker)
    damage: list[str] = []
    for file, saved in sorted(marker.files.items()):
        for begin in range(0, saved.size_bytes, READ_BYTES_MAX):
            try:
                reader.read(file, begin, min(begin + READ_BYTES_MAX, saved.size_bytes))
            except DamagedError as error:
                damage += error.damage
                break
    if damage:
        raise DamagedError(name, damage)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Wanted:
    """A part of a piece, and the range of its bytes in the file."""

    item: ReadItem
    piece: Piece
    begin: int
    end: int

    @property
    def place(self) -> tuple[str, int]:
        return self.piece.file, self.begin


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Reader:
    """Reads verified ranges of a checkpoint's files."""

    store: ObjectStore
    name: str
    marker: CommitMarker

    def read(self, file: str, begin: int, end: int) -> bytes:
        """Read whole blocks."""
        why = ""
        for _ in range(READ_TRIES_MAX):
            why, data = self._look(file, begin, end)
            if not why:
                advance()
                return data
        raise DamagedError(self.name, [f"{file}: {why}"])

    def _look(self, file: str, begin: int, end: int) -> tuple[str, bytes]:
        saved = self.marker.files.get(file)
        if saved is None:
            return "the marker does not name it", b""
        try:
            data = self.store.get_range(f"{self.name}/{file}", start=begin, length=end - begin)
        except ObjectNotFoundError:
            return "it is missing", b""
        if len(data) < end - begin:
            return f"it has {begin + len(data)} bytes, expected {saved.size_bytes}", b""
        return first_difference(data, saved.blocks, begin=begin), data


def _wanted(item: ReadItem, pieces: Mapping[MetadataIndex, Piece]) -> _Wanted:
    """Return the byte range of a part: from its first element to its last, in the piece's own order."""
    piece = pieces[item.storage_index]
    strides = _strides(piece.sizes)
    first = sum(offset * stride for offset, stride in zip(item.storage_offsets, strides, strict=True))
    steps = zip(item.lengths, strides, strict=True)
    last = first + sum((length - 1) * stride for length, stride in steps)
    empty = 0 in item.lengths
    size = piece.dtype.itemsize
    begin = piece.begin + first * size
    return _Wanted(item=item, piece=piece, begin=begin, end=begin if empty else piece.begin + (last + 1) * size)


def _runs(wanted: Iterable[_Wanted]) -> Iterator[list[_Wanted]]:
    """Join parts whose blocks touch."""
    run: list[_Wanted] = []
    end = 0
    for part in wanted:
        near = run and run[0].piece.file == part.piece.file and aligned(part.begin, part.end, part.end)[0] <= end
        if run and not (near and part.end - run[0].begin <= READ_BYTES_MAX):
            yield run
            run, end = [], 0
        run.append(part)
        end = max(end, part.end)
    if run:
        yield run


def _fill(reader: _Reader, run: Sequence[_Wanted], planner: DefaultLoadPlanner) -> int:
    """Read a run and copy its parts to their tensors."""
    file = run[0].piece.file
    saved = reader.marker.files.get(file)
    begin, end = aligned(run[0].begin, max(part.end for part in run), saved.size_bytes if saved else 0)
    # Torch requires writable memory.
    data = bytearray(reader.read(file, begin, end))
    for part in run:
        dtype = part.piece.dtype
        count = (part.end - part.begin) // dtype.itemsize
        stored = torch.frombuffer(data, dtype=dtype, count=count, offset=part.begin - begin)
        box = stored.as_strided(part.item.lengths, _strides(part.piece.sizes))
        target = planner.resolve_tensor(part.item).detach()
        if target.dtype != dtype:
            raise RefusedError(
                f"checkpoint does not fit: {reader.name}: {part.piece.tensor} is {dtype}, this run has {target.dtype}",
                field="spec.model",
            )
        target.copy_(box)
    return end - begin


def _strides(sizes: Sequence[int]) -> tuple[int, ...]:
    strides = [1]
    for size in reversed(sizes[1:]):
        strides.append(strides[-1] * size)
    return tuple(reversed(strides)) if sizes else ()


def _groups(items: Sequence[WriteItem]) -> Iterator[list[WriteItem]]:
    """Split a plan into files, in its order."""
    group: list[WriteItem] = []
    size = 0
    for item in items:
        length = item.tensor_storage_size() or 0
        if group and size + length > FILE_BYTES_MAX:
            yield group
            group, size = [], 0
        group.append(item)
        size += length
    if group:
        yield group


def _piece(item: WriteItem, tensor: Tensor, file: str, begin: int) -> Piece:
    data = item.tensor_data
    if data is None or not can_hold(tensor.dtype):
        raise TypeError(f"a checkpoint has no name for the type {tensor.dtype}: {item.index.fqn}")
    return Piece(
        tensor=item.index.fqn,
        dtype=tensor.dtype,
        shape=tuple(data.size),
        offsets=tuple(data.chunk.offsets),
        sizes=tuple(tensor.shape),
        file=file,
        begin=begin,
    )


def _bytes_of(tensor: Tensor) -> memoryview | bytes:
    """The bytes of a host tensor; without a copy if it is contiguous."""
    if not tensor.numel():
        return b""
    flat = tensor.detach().contiguous().view(-1)
    return flat.view(torch.uint8).numpy().data
