"""Tensors that autograd keeps after a forward, including hooks of the model's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from polyreme_trainer.model import recompute


def kept_bytes(run: Callable[[], object], *, without: Iterable[Tensor] = ()) -> int:
    """Run a forward; count the storages that it keeps, each once, except those of some tensors."""
    known = {tensor.untyped_storage().data_ptr() for tensor in without}
    kept: dict[int, Any] = {}
    real = recompute._Region.pack

    def count(held: Any) -> Any:
        if isinstance(held, Tensor) and held.untyped_storage().data_ptr() not in known:
            kept[held.untyped_storage().data_ptr()] = held.untyped_storage()
        return held

    vars(recompute)["_Region"].pack = lambda region, tensor: count(real(region, tensor))
    try:
        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            run()
    finally:
        vars(recompute)["_Region"].pack = real
    return sum(storage.nbytes() for storage in kept.values())
