"""Initial values that depend only on the seed and the global name of a parameter, never on the layout.

Every tensor, and every expert of a stacked tensor, is drawn by a generator of its own. A rank that holds experts 4..7
draws only these and gets bit by bit the same as a rank with all experts; one that holds a slice of a tensor draws the
whole and cuts it.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from polyreme_planner.adapters import Adapters
from polyreme_planner.shapes import ModelShape
from polyreme_trainer.model.adapters import A, B, adapt, is_adapter
from polyreme_trainer.model.compute_options import DEFAULT_OPTIONS, ComputeOptions
from polyreme_trainer.model.moe import Dispatcher
from polyreme_trainer.model.section import Section
from polyreme_trainer.model.sharding import cut_of, slice_of, whole_shape
from polyreme_trainer.model.tensor import ALONE, TensorRanks
from polyreme_trainer.model.vlm import KimiVL

STACKED = tuple(f".experts.{matrix}{end}" for matrix in ("gate_up_proj", "down_proj") for end in ("", f"_{A}", f"_{B}"))
"""Suffixes of the names of parameters that stack experts."""
EXACT = ".mlp.gate.weight"
"""Suffix of the names of parameters that stay float32: the scores that choose experts are computed in it."""


Rows = tuple[Tensor, int]
"""Rows of a parameter, and the number of the first among all of it."""


def all_rows(parameter: Tensor) -> Rows:
    """A parameter that is held whole."""
    return parameter, 0


def build_model(
    shape: ModelShape,
    *,
    seed: int,
    media_token: int,
    section: Section | None = None,
    experts_local: range | None = None,
    dispatcher: Dispatcher | None = None,
    ranks: TensorRanks = ALONE,
    options: ComputeOptions = DEFAULT_OPTIONS,
    adapters: Adapters | None = None,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> KimiVL:
    """Build and initialise a model; parameters in ``dtype``, the router's correction bias in float32.

    On the device ``meta`` it takes no memory, and has no values.

    Raises:
        InvalidConfigError: If ``experts_local`` or ``ranks`` do not fit the shape.
    """
    with torch.device("meta"):
        model = KimiVL(
            shape,
            media_token=media_token,
            section=section,
            experts_local=experts_local,
            dispatcher=dispatcher,
            ranks=ranks,
            options=options,
        )
        if adapters is not None:
            adapt(model, adapters)
    if torch.device(device).type == "meta":
        return model
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            empty = torch.empty(parameter.shape, dtype=dtype, device=device)
            module.register_parameter(name, nn.Parameter(empty))
    open_buffers(model, device)
    with torch.no_grad():
        for name, first, rows in drawn_rows(model, seed=seed):
            model.get_parameter(name)[first : first + rows.shape[0]].copy_(rows)
    return model


def open_buffers(model: nn.Module, device: torch.device | str) -> None:
    """Give what is no parameter, the router's correction biases, its place and first value, zero."""
    for module in model.modules():
        for name, buffer in module.named_buffers(recurse=False):
            module.register_buffer(name, torch.zeros(buffer.shape, dtype=buffer.dtype, device=device))


def outline(shape: ModelShape, adapters: Adapters | None = None) -> dict[str, Tensor]:
    """Name every tensor of the whole model, in its order; the tensors are on the meta device and take no memory."""
    return build_model(shape, seed=0, media_token=0, adapters=adapters, device="meta").state_dict()


@torch.no_grad()
def drawn_rows(
    model: KimiVL, *, seed: int, rows_of: Callable[[Tensor], Rows] = all_rows
) -> Iterator[tuple[str, int, Tensor]]:
    """Yield each parameter's name, the number of a row, and the initial values from there on, in float32 on the host.

    Weights are normal, norms one, biases and the adapters' B zero. Stacked experts come one by one: a whole tensor is
    drawn at a time.

    Args:
        model: Any slice of the model; its values are not read.
        seed: The run's seed.
        rows_of: Returns the rows of a parameter that are here.
    """
    for name, parameter in model.named_parameters():
        own, first = rows_of(parameter)
        end = first + own.shape[0]
        if name.endswith((".bias", B)):
            yield name, first, torch.zeros(own.shape)
        elif "norm" in name.rsplit(".", 2)[-2]:
            yield name, first, torch.ones(own.shape)
        elif name.endswith(STACKED):
            for row, expert in enumerate(model.experts_local[first:end], start=first):
                yield name, row, _drawn(own.shape[1:], f"{name}.{expert}", seed, model.shape).unsqueeze(0)
        elif model.ranks.parts > 1 and (cut := cut_of(name)) is not None:
            whole = _drawn(whole_shape(parameter.shape, cut, model.ranks.parts), name, seed, model.shape)
            yield name, first, slice_of(whole, cut, place=model.ranks.place, parts=model.ranks.parts)[first:end]
        else:
            yield name, first, _drawn(parameter.shape, name, seed, model.shape)[first:end]


def _drawn(sizes: Sequence[int], name: str, seed: int, shape: ModelShape) -> Tensor:
    """Draw a whole tensor, in float32 and in host memory."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little") >> 1)
    return torch.randn(tuple(sizes), generator=generator, dtype=torch.float32).mul_(_spread(name, sizes, shape))


def _spread(name: str, sizes: Sequence[int], shape: ModelShape) -> float:
    """Standard deviation: the decoder's own, and one over the root of the inputs for tower, projector and adapters."""
    if name.startswith("language_model.") and not is_adapter(name):
        return shape.decoder.initializer_range
    if name.endswith("pos_emb.weight"):
        return shape.decoder.initializer_range
    return 1.0 / math.sqrt(math.prod(sizes[1:]))
