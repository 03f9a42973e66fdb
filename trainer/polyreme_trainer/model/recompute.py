"""Recomputation of layers in the backward pass to save memory: of nothing, of what is cheap, or of the whole layer.

``SELECTIVE`` keeps and recomputes of each layer:

    kept                                    reason
    the input stream of a norm              everything else of the layer can be computed from it
    products: queries, latents, both        a product takes most of a layer's time
    halves of a gated feed-forward,
    outputs of a layer
    outputs of attention kernels            their time grows with the square of a document
    rows received by an exchange            an exchange is made once: gathered rows, rows for experts, a ring's keys;
                                            one that were repeated on some ranks only would wait forever
    the choice of experts, with its order   it must not depend on the last bit of a recomputed score

    recomputed                              reason
    outputs of a norm                       as wide as the stream, a few operations per number
    outputs of an activation, and the       as wide as the feed-forward, a few operations per number
    gated product
    keys and values of all heads            wider than their latent by the number of heads
    values padded to the width of keys,     copies
    segments padded to one length

``FULL`` keeps only the stream between layers, and the counts of an uneven exchange, which the host waits for. It
recomputes each layer as a whole, all other exchanges included: every rank of a group holds the same layers and runs
their backwards in the same order, so their exchanges meet. Zero-bubble schedules
compute the gradients of inputs and of weights apart, and each would recompute the layer: they are refused.

Either way the same operations run on the same numbers, and gradients are added up in the same order: losses and
gradients are those of ``NONE``, bit for bit. Nothing here draws random numbers.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any, TypeVar, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from polyreme_planner.costs import Recompute

Make = Callable[..., Tensor]
Value = TypeVar("Value")


def run_layer(recompute: Recompute, layer: Callable[..., Value], *inputs: Any) -> Value:
    """Run a layer that keeps as little as ``recompute`` says; without gradient it keeps nothing anyway."""
    if recompute is Recompute.NONE or not torch.is_grad_enabled():
        return layer(*inputs)
    if recompute is Recompute.FULL:
        once = _Once()
        repeated = checkpoint(
            layer, *inputs, use_reentrant=False, preserve_rng_state=False, context_fn=lambda: (once, once)
        )
        return cast("Value", repeated)
    with _selective():
        return layer(*inputs)


def computed_once(make: Callable[[], Value]) -> Value:
    """Make something outside of the graph, which a layer that is recomputed as a whole then takes instead."""
    once = _ONCE.get()
    return make() if once is None else once.value(make)


def recomputable(make: Make, *inputs: Tensor) -> Tensor:
    """Make a tensor that, if the layer runs selectively, is recomputed whenever a backward needs it.

    Args:
        make: A function of ``inputs`` alone.
        inputs: Kept instead; some may be recomputable themselves.
    """
    region = _REGION.get()
    made = make(*inputs)
    if region is not None:
        region.can_make(made, make, inputs)
    return made


def recomputable_copy(make: Make, given: Tensor) -> Tensor:
    """Do the same for a copy, but only if the original is recomputable; otherwise the copy is kept instead."""
    region = _REGION.get()
    return recomputable(make, given) if region is not None and region.knows(given) else make(given)


def recomputable_block(make: Make, *inputs: Tensor) -> Tensor:
    """Do the same for a function of several operations: tensors that they save for each other are not kept either.

    Each input must have no other use by which it gets a gradient, or bits may differ: two gradients that are added
    inside are added in another order outside.
    """
    region = _REGION.get()
    if region is None:
        return make(*inputs)
    made: Tensor = _Inside.apply(make, *inputs)
    region.can_make(made, make, inputs)
    return made


class _Once:
    """What one layer has computed once: entered for its forward, and again when it is repeated."""

    def __init__(self) -> None:
        self._values: list[Any] = []
        self._next = 0
        self._token: contextvars.Token[_Once | None] | None = None

    def __enter__(self) -> None:
        self._next, self._token = 0, _ONCE.set(self)

    def __exit__(self, *_: object) -> None:
        if self._token is not None:
            _ONCE.reset(self._token)

    def value(self, make: Callable[[], Value]) -> Value:
        """Return what the same call has returned the first time."""
        if self._next == len(self._values):
            self._values.append(make())
        self._next += 1
        return cast("Value", self._values[self._next - 1])


_ONCE: contextvars.ContextVar[_Once | None] = contextvars.ContextVar("once", default=None)


class _Recipe:
    """Recipe of a recomputable tensor; the tensor stays until all users have had it."""

    __slots__ = ("_inputs", "_made", "_make", "_served", "uses")

    def __init__(self, make: Make, inputs: list[Tensor | _Part]) -> None:
        self._make = make
        self._inputs = inputs
        self._made: Tensor | None = None
        self._served = 0
        self.uses = 0

    def tensor(self) -> Tensor:
        made = self._made
        if made is None:
            with torch.no_grad():
                made = self._make(*(_unpack(given) for given in self._inputs))
        self._served = (self._served + 1) % max(1, self.uses)
        self._made = made if self._served else None
        return made


class _Part:
    """A view of a recomputable tensor, in place of the tensor that autograd saves."""

    __slots__ = ("_offset", "_recipe", "_size", "_stride")

    def __init__(self, recipe: _Recipe, view: Tensor) -> None:
        recipe.uses += 1
        self._recipe = recipe
        self._size, self._stride, self._offset = view.size(), view.stride(), view.storage_offset()

    def tensor(self) -> Tensor:
        return self._recipe.tensor().as_strided(self._size, self._stride, self._offset)


class _Region:
    """The forward of one layer: its recomputable storages. They live as long as it does, so no address repeats."""

    def __init__(self) -> None:
        self._recipes: dict[int, tuple[_Recipe, Tensor]] = {}

    def can_make(self, made: Tensor, make: Make, inputs: tuple[Tensor, ...]) -> None:
        address = made.untyped_storage().data_ptr()
        # A view of an input is kept with it; empty tensors all have the same address.
        if made.numel() and all(address != given.untyped_storage().data_ptr() for given in inputs):
            self._recipes[address] = (_Recipe(make, [self.pack(given) for given in inputs]), made.detach())

    def knows(self, tensor: Tensor) -> bool:
        """Whether it is recomputable."""
        found = self._recipes.get(tensor.untyped_storage().data_ptr())
        return found is not None and found[1].dtype == tensor.dtype

    def forget(self) -> None:
        """Let go of the tensors that can be recomputed; their recipes are with what was saved."""
        self._recipes.clear()

    def pack(self, tensor: Tensor) -> Tensor | _Part:
        """Save a tensor for the backward: its recipe if there is one, else itself, detached from the graph."""
        if not self.knows(tensor):
            return tensor.detach()
        return _Part(self._recipes[tensor.untyped_storage().data_ptr()][0], tensor)


_REGION: contextvars.ContextVar[_Region | None] = contextvars.ContextVar("region", default=None)


@contextlib.contextmanager
def _selective() -> Iterator[None]:
    region = _Region()
    token = _REGION.set(region)
    try:
        with torch.autograd.graph.saved_tensors_hooks(region.pack, _unpack):
            yield
    finally:
        _REGION.reset(token)
        # The graph keeps the hook, and with it the region, until its backward: without this nothing would be freed.
        region.forget()


def _unpack(kept: Tensor | _Part) -> Tensor:
    return kept.tensor() if isinstance(kept, _Part) else kept


class _Inside(torch.autograd.Function):
    """Several operations as one, which only keeps their inputs and runs them again for the gradient."""

    @staticmethod
    def forward(ctx: Any, make: Make, *inputs: Tensor) -> Tensor:
        ctx.make = make
        ctx.save_for_backward(*inputs)
        return make(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        inputs = [
            given.detach().requires_grad_(wanted)
            for given, wanted in zip(ctx.saved_tensors, ctx.needs_input_grad[1:], strict=True)
        ]
        with torch.enable_grad():
            made = ctx.make(*inputs)
        gradients = iter(torch.autograd.grad(made, [given for given in inputs if given.requires_grad], grad))
        return None, *(next(gradients) if given.requires_grad else None for given in inputs)
