"""The training state as the content of a checkpoint: live buffers, and the tensor and shard that each part is."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import torch
from torch import Tensor

from polyreme_trainer.checkpoint.content import Content, FlatTensors
from polyreme_trainer.checkpoint.shards import ShardAxis, TensorShard
from polyreme_trainer.model.sharding import Cut, cut_of
from polyreme_trainer.parallel.flat_buffers import FlatModel, FlatParameters, Slices
from polyreme_trainer.parallel.fsdp import ShardedParameters
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.state import TrainState, settle

NO_SLICES = Slices()


def content(state: TrainState, meshes: Meshes, *, with_rng: bool = True, with_optimizer: bool = True) -> Content:
    """Name everything that a checkpoint must hold, as views of the live buffers (the generator's state is a copy).

    With adapters only these are named: the frozen model, and its router biases, are where they came from.

    Weights are float32, whatever the model computes in: after a load into the float32 originals, call ``restored``.
    """
    settle(state)
    weights = [held for part in state.flat.parts for held in _weights(state.flat, part)]
    moments = [
        _held(state.flat, own.part, prefix=f"optimizer.{kind}", buffer=buffer, begin=begin)
        for own in state.optimizer.states
        for kind, buffer, begin in own.buffers()
    ]
    biases = _named_biases(state) if state.adapters is None else {}
    generator = {f"rng.{meshes.rank}": torch.get_rng_state()} if with_rng else {}
    flat = [part for part in (*weights, *(moments if with_optimizer else ())) if part.slots]
    return Content(flat=flat, plain={**biases, **generator})


def computed_content(state: TrainState) -> Content:
    """Name the weights with which this rank computes, or of sharded ones its rows, and the routers' biases."""
    settle(state)
    weights = [held for part in state.flat.parts for held in _weights(state.flat, part, computed=True)]
    return Content(flat=[part for part in weights if part.slots], plain=_named_biases(state))


def restored(state: TrainState) -> None:
    """Update the parameters from the originals that were loaded; every rank calls it."""
    for part in state.flat.parts:
        for piece in () if part.masters is None else part.pieces:
            part.publish(piece)
            if state.zero1 is not None:
                state.zero1.gather(part, piece)
    settle(state)


def adopted(state: TrainState) -> None:
    """Take parameters that were set from outside as the originals."""
    for part in state.flat.parts:
        part.adopt()


def shard_of(name: str, flat: FlatModel) -> TensorShard:
    """Describe this rank's part of a parameter."""
    return slice_shard(name, experts=flat.experts.slices, tensor=flat.tensor.slices)


def slice_shard(name: str, *, experts: Slices, tensor: Slices = NO_SLICES) -> TensorShard:
    """Describe a rank's part of a parameter: the only place that says which mesh axes cut a checkpoint's tensors."""
    if name in experts.names:
        return TensorShard(name=name, axes=(ShardAxis("expert", Cut(dim=0), experts.place, experts.count),))
    if name in tensor.names and (cut := cut_of(name)) is not None:
        return TensorShard(name=name, axes=(ShardAxis("tensor", cut, tensor.place, tensor.count),))
    return TensorShard(name=name)


def _named_biases(state: TrainState) -> dict[str, Tensor]:
    return {f"router_bias.{layer}": bias for layer, bias in state.router_biases.items()}


def _weights(flat: FlatModel, part: FlatParameters, *, computed: bool = False) -> Iterator[FlatTensors]:
    """Name the weights: if the model computes in another type, their float32 originals, of what this rank updates.

    Args:
        flat: All of the rank's parameters.
        part: Some of them.
        computed: Those of that other type instead.
    """
    if isinstance(part, ShardedParameters):
        for piece in part.pieces:
            yield _held(flat, part, prefix="model", buffer=part.own_values(piece), begin=piece.own)
    elif part.masters is None or computed:
        shards = [shard_of(slot.name, flat) for slot in part.slots]
        yield FlatTensors(prefix="model", shards=shards, slots=part.slots, buffer=part.values)
    else:
        yield _held(flat, part, prefix="model", buffer=part.masters, begin=0)


def _held(flat: FlatModel, part: FlatParameters, *, prefix: str, buffer: Tensor, begin: int) -> FlatTensors:
    """Name a buffer with one number per scalar that this rank updates, starting at its scalar ``begin``."""
    end = begin + buffer.shape[0]
    pieces = [piece for piece in part.pieces if begin <= piece.own < end]
    first, last = (pieces[0].bucket.start, pieces[-1].bucket.end) if pieces else (0, 0)
    slots = tuple(slot for slot in part.slots if first <= slot.start < last)
    shards = [shard_of(slot.name, flat) for slot in slots]
    if part.shares.count > 1:
        return FlatTensors(prefix=prefix, shards=shards, slots=slots, buffer=buffer, pieces=pieces, begin=begin)
    moved = tuple(dataclasses.replace(slot, start=slot.start - first) for slot in slots)
    return FlatTensors(prefix=prefix, shards=shards, slots=moved, buffer=buffer)
