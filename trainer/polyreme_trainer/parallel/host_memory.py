"""Host memory that a device copies from and to: pinned, and as large as asked for.

torch takes pinned memory from a cache that rounds every size up to a power of two: a rank with 33 GiB of state would
pin 64. So memory is mapped here, page by page, and registered with the device afterwards.
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable

import torch
from torch import Tensor

Pin = Callable[[int, int], Callable[[], object]]
"""Pins memory, given its address and size [bytes]; what it returns undoes that."""

_log = logging.getLogger(__name__)


class _Pages(mmap.mmap):
    """Mapped memory that the device forgets before it is unmapped."""

    release: Callable[[], object] | None = None

    def __del__(self) -> None:
        if self.release is not None:
            self.release()


def register(address: int, size: int) -> Callable[[], object]:
    """Pin memory for all devices of this process.

    Raises:
        torch.cuda.CudaError: If the system refuses it, by its limit of locked memory say.
    """
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(address, size, 0))
    return lambda: runtime.cudaHostUnregister(address)


def pinned_zeros(length: int, dtype: torch.dtype = torch.float32, *, pin: Pin = register) -> Tensor:
    """Allocate pinned zeros; where the system refuses to pin them they are not, and copies take longer.

    Args:
        length: Numbers.
        dtype: Their type.
        pin: Pins the memory.
    """
    if not length:
        return torch.zeros(0, dtype=dtype)
    pages = _Pages(-1, length * dtype.itemsize)  # shared, so that a fork copies no page under a transfer
    zeros = torch.frombuffer(pages, dtype=dtype)
    try:
        pages.release = pin(zeros.data_ptr(), zeros.nbytes)
    except torch.cuda.CudaError as error:
        _log.warning("can't pin %d bytes of host memory, copies will be slower: %s", zeros.nbytes, error)
    return zeros
