"""Places at which a host waits for its accelerator, found without one by what is called.

A wait is a read of a tensor's values by the host, an operation whose result has as many rows as the values say, and a
copy to the device from memory that is not pinned. What was copied to the host before is read without another wait.
"""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

WAITS = frozenset({
    "item", "tolist", "numpy", "cpu", "__bool__", "__int__", "__float__", "__index__",
    "nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount",
    "equal", "allclose", "is_nonzero",
})  # fmt: skip
PACKAGE = "polyreme_trainer"


class HostWaits(TorchFunctionMode):
    """Counts waits and pinned copies by their place in the trainer, ``folder/module.py``."""

    def __init__(self) -> None:
        super().__init__()
        self.waits: Counter[str] = Counter()
        self.copies: Counter[str] = Counter()
        self._here: dict[int, Any] = {}
        """Storages of what came to the host or is pinned, by their address; kept, so that no address repeats."""

    def __enter__(self) -> Self:
        """Watch; a fake device has no pinned memory, so what would be there is remembered."""

        def pinned(tensor: Tensor) -> Tensor:
            return self._keep(tensor)

        self._patch = mock.patch.object(Tensor, "pin_memory", pinned)
        self._patch.start()
        super().__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        """Stop watching."""
        super().__exit__(*raised)
        self._patch.stop()

    def __torch_function__(
        self,
        called: Callable[..., Any],
        types: Sequence[type],
        given: Sequence[Any] = (),
        named: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run an operation, and count it if the host waits for it."""
        named, name = named or {}, getattr(called, "__name__", "")
        tensors = [leaf for leaf in tree_leaves((given, named)) if isinstance(leaf, Tensor)]
        if not tensors:
            return called(*given, **named)
        here = all(map(self._is_here, tensors))
        if name == "to" and given[1:] == ("cpu",) and not here:
            self._wait()
            return self._keep(given[0].clone())
        if not here and _depends_on_values(name, given, named):
            self._wait()
        made = called(*given, **named)
        if name in ("to", "copy_") and made.device.type != "cpu" and tensors[-1].device.type == "cpu":
            if here:
                self.copies[_place()] += 1
            else:
                self._wait()
        elif here:
            for leaf in tree_leaves(made):
                if isinstance(leaf, Tensor):
                    self._keep(leaf)
        return made

    def _keep(self, tensor: Tensor) -> Tensor:
        with torch._C.DisableTorchFunction():
            storage = tensor.untyped_storage()
            self._here[storage._cdata] = storage
        return tensor

    def _is_here(self, tensor: Tensor) -> bool:
        with torch._C.DisableTorchFunction():
            return tensor.untyped_storage()._cdata in self._here

    def _wait(self) -> None:
        if place := _place():
            self.waits[place] += 1


def _depends_on_values(name: str, given: Sequence[Any], named: Mapping[str, Any]) -> bool:
    if name == "repeat_interleave":
        return named.get("output_size") is None
    if name == "where":
        return len(given) == 1
    if name in ("__getitem__", "__setitem__", "index_put_"):
        return any(isinstance(leaf, Tensor) and leaf.dtype == torch.bool for leaf in tree_leaves(given[1]))
    return name in WAITS


def _place() -> str:
    """Return the innermost place in the trainer, but for the function that copies; empty outside."""
    for frame in reversed(traceback.extract_stack(limit=40)):
        path = Path(frame.filename)
        if PACKAGE in path.parts and path.name != "transfer.py":
            return f"{path.parent.name}/{path.name}"
    return ""
