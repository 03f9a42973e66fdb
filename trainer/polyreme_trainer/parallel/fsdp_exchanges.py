"""Exchanges of FSDP2, recorded on this rank's page like those of the trainer's own.

They implement torch's ``AllGather`` and ``ReduceScatter`` (``FSDPModule.set_custom_all_gather``), whose base classes
have no public name. The exchanges are torch's own; on an accelerator they end after they are entered.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from polyreme_trainer.parallel import collectives


class _Allocating:
    """Allocates what an exchange writes."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory without values."""
        return torch.empty(*size, dtype=dtype, device=device)


class _Gather(_Allocating):
    """Joins the shares of all ranks."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> dist.Work | None:
        """Exchange; torch names the arguments."""
        return collectives.gather_into(output_tensor, input_tensor, group, async_op=async_op)


class _ReduceScatter(_Allocating):
    """Reduces into equal shares, one per rank."""

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, op: Any, async_op: bool = False
    ) -> dist.Work | None:
        """Exchange; torch names the arguments."""
        return collectives.reduce_into(output_tensor, input_tensor, group, op=op, async_op=async_op)


def record_exchanges(unit: FSDPModule) -> None:
    """Let a unit's exchanges be recorded."""
    gather: Any = _Gather()
    reduce: Any = _ReduceScatter()
    unit.set_custom_all_gather(gather)
    unit.set_custom_reduce_scatter(reduce)
