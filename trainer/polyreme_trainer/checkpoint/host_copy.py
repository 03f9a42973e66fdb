"""The newest committed checkpoint of a rank in shared memory, for the next ranks of the same pod.

Most attempts end because a process died, not a machine: the memory is still intact, and faster than any storage. It is
only a copy: a rank looks for it after it has read the marker of the attempt's resume point from durable storage, and
uses it if it was made under exactly that marker, for the same tensors of the same layout, and its checksums hold.
Otherwise the rank reads storage.

Copy and record are two files in memory without a name: the launcher opens them and every generation of the rank
inherits them, so the kernel frees them when launcher and ranks are gone. There is at most one copy. Memory is reserved
before it is written: a write to memory that does not exist would kill the process.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import mmap
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from polyreme_api.blocks import BLOCK_BYTES, checksums, first_difference
from polyreme_api.commit_marker import CommitMarker, seal
from polyreme_trainer.checkpoint.content import Content

FREE_SHARE_MIN = 0.25
"""Share of the file system that copies leave free: it is the pod's memory, and others need some."""

_log = logging.getLogger(__name__)


class HostCopies:
    """One rank's copy.

    Args:
        data: Descriptor of the file that holds the copy.
        record: Descriptor of the file that says what was copied; empty while there is no copy.
    """

    def __init__(self, data: int, record: int) -> None:
        self._data, self._record = data, record
        self._map: mmap.mmap | None = None
        self._given_up = False

    def keep(self, content: Content, marker: CommitMarker) -> None:
        """Keep the content of a checkpoint that was just committed, instead of the one before; never fails a save."""
        try:
            self._keep(content, marker)
        except OSError as error:
            self.drop()
            if not self._given_up:
                _log.warning("no copy is kept in host memory, so a restart will read storage: %s", error)
            self._given_up = True

    def restore(self, content: Content, marker: CommitMarker) -> bool:
        """Fill the content's tensors from the copy of exactly this checkpoint; False if there is none."""
        try:
            if not (size := os.fstat(self._record).st_size):
                return False
            said: dict[str, Any] = json.loads(os.pread(self._record, size, 0))
            with mmap.mmap(self._data, 0, access=mmap.ACCESS_COPY) as data:
                return self._restore(content, marker, said, data)
        except (OSError, ValueError, KeyError, TypeError) as error:
            _log.warning("copy in host memory can't be read, reading storage instead: %s", error)
            return False

    def drop(self) -> None:
        """Give the memory back."""
        self._map = None
        with contextlib.suppress(OSError):
            os.ftruncate(self._record, 0)
            os.ftruncate(self._data, 0)

    def _keep(self, content: Content, marker: CommitMarker) -> None:
        buffers = content.buffers()
        # First, so that no record ever describes bytes of another copy.
        os.ftruncate(self._record, 0)
        total = _places(buffers)[-1]
        if self._map is None or len(self._map) != total:
            self._map = None
            self._map = _reserve(self._data, total)
        view = memoryview(self._map)
        for buffer, kept in zip(buffers, _over(self._map, buffers), strict=True):
            kept.copy_(buffer)
        said = {"marker": _digest(seal(marker)), "layout": _layout(content), "blocks": checksums(view)}
        # A record that is torn by a kill is not JSON, and then there is no copy.
        _write_all(self._record, json.dumps(said).encode())

    def _restore(self, content: Content, marker: CommitMarker, said: dict[str, Any], data: mmap.mmap) -> bool:
        if said["marker"] != _digest(seal(marker)) or said["layout"] != _layout(content):
            return False
        buffers = content.buffers()
        if len(data) != _places(buffers)[-1] or len(said["blocks"]) != -(-len(data) // BLOCK_BYTES):
            return False
        view = memoryview(data)
        try:
            why = first_difference(view, said["blocks"], begin=0)
        finally:
            view.release()
        if why:
            _log.warning("copy in host memory is damaged, reading storage instead: %s", why)
            return False
        for buffer, kept in zip(buffers, _over(data, buffers), strict=True):
            buffer.copy_(kept)
        _log.info("checkpoint a%06d-s%08d loaded from host memory", marker.attempt, marker.step)
        return True


def _reserve(file: int, total: int) -> mmap.mmap:
    """Reserve memory for a copy.

    Raises:
        OSError: If there is not enough, or too little would be left for others.
    """
    os.ftruncate(file, 0)
    disk = os.fstatvfs(file)
    free, whole = disk.f_bavail * disk.f_frsize, disk.f_blocks * disk.f_frsize
    if free - total < FREE_SHARE_MIN * whole:
        raise OSError(
            f"shared memory has {free} bytes free of {whole}, the copy takes {total}, "
            f"expected {FREE_SHARE_MIN:.0%} to stay free"
        )
    os.posix_fallocate(file, 0, max(total, 1))
    return mmap.mmap(file, total)


def _write_all(file: int, data: bytes) -> None:
    at = 0
    while at < len(data):
        at += os.pwrite(file, data[at:], at)


def _places(buffers: Sequence[Tensor]) -> list[int]:
    """Return where each buffer begins, at multiples of 64, and where the last one ends."""
    places = [0]
    for buffer in buffers:
        places.append(places[-1] + -(-buffer.nbytes // 64) * 64)
    return places


def _over(data: mmap.mmap, buffers: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the buffers' sizes over mapped memory."""
    return [
        torch.frombuffer(data, dtype=buffer.dtype, count=buffer.numel(), offset=begin).view(buffer.shape)
        if buffer.numel()
        else torch.empty_like(buffer, device="cpu")
        for buffer, begin in zip(buffers, _places(buffers), strict=False)
    ]


def _layout(content: Content) -> str:
    """Digest of the content's layout: names, sizes, types and shards."""
    flat = [part.outline() for part in content.flat]
    plain = [(name, tuple(t.shape), str(t.dtype)) for name, t in sorted(content.plain.items())]
    return _digest(repr((flat, plain)).encode())


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()
