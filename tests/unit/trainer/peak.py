"""Peak of the memory of tensors on one kind of device, counted by their storages; also of tensors without values."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class PeakMemory(TorchDispatchMode):
    """Counts the bytes of all storages that are made while it is entered."""

    def __init__(self, device_type: str) -> None:
        super().__init__()
        self.live_bytes: int = 0
        self.peak_bytes: int = 0
        self._device_type = device_type
        self._seen: set[int] = set()

    def __torch_dispatch__(
        self,
        called: Callable[..., Any],
        types: Sequence[type],
        given: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count the storages of its results."""
        made = called(*given, **(named or {}))
        for leaf in tree_leaves(made):
            held = leaf._local_tensor if isinstance(leaf, DTensor) else leaf
            if isinstance(held, Tensor) and held.device.type == self._device_type:
                self._add(held)
        return made

    def _add(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._seen:
            self._seen.add(key)
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._drop, key, size)

    def _drop(self, key: int, size: int) -> None:
        self._seen.discard(key)
        self.live_bytes -= size
