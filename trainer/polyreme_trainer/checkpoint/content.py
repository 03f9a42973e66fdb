"""What a checkpoint holds, under names that do not depend on the layout.

``model.<parameter>``, ``optimizer.first.<parameter>``, ``optimizer.second.<parameter>``, ``router_bias.<layer>``,
``rng.<rank>``. Whole tensors are the same on several ranks and saved once; a stacked expert tensor, and one that tensor
ranks share, is one global tensor of which each rank holds a slice, so another degree reads other slices of the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from polyreme_trainer.checkpoint.slices import Slice
from polyreme_trainer.model.sharding import Cut, cut_of
from polyreme_trainer.parallel.flat_buffers import Slot


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FlatTensors:
    """Many tensors in one buffer, all under one prefix."""

    prefix: str
    slots: Sequence[Slot]
    buffer: Tensor
    part: tuple[int, int] | None = None
    """Which of how many equal slices each tensor is; None for whole tensors."""

    def outline(self) -> tuple[object, ...]:
        """What lies where: names, places, sizes, which slices, type."""
        return self.prefix, [(s.name, s.start, s.shape) for s in self.slots], self.part, str(self.buffer.dtype)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and views."""
        for slot in self.slots:
            name, view = f"{self.prefix}.{slot.name}", slot.view(self.buffer)
            if self.part is None:
                yield name, view
            else:
                place, parts = self.part
                # Stacks of experts stand in no table: they are cut by rows.
                yield name, Slice.of(view, cut_of(slot.name) or Cut(dim=0), place=place, parts=parts)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Content:
    """All tensors of a checkpoint on one rank."""

    flat: Sequence[FlatTensors]
    plain: Mapping[str, Tensor]
    """Small tensors outside the buffers."""

    def buffers(self) -> list[Tensor]:
        """All memory that it lies in: the flat buffers, then the small tensors by name."""
        return [*(part.buffer for part in self.flat), *(self.plain[name] for name in sorted(self.plain))]

    def over(self, buffers: Sequence[Tensor]) -> Content:
        """The same names over other memory, given in the order of ``buffers``."""
        flat = [dataclasses.replace(part, buffer=buffer) for part, buffer in zip(self.flat, buffers, strict=False)]
        plain = dict(zip(sorted(self.plain), buffers[len(flat) :], strict=True))
        return Content(flat=flat, plain=plain)

    def state_dict(self) -> dict[str, Tensor]:
        """Name every tensor as distributed checkpointing wants them; views, so that a load writes in place."""
        return {**self.plain, **{name: tensor for part in self.flat for name, tensor in part.tensors()}}
