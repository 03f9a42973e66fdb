"""Runs of scalars are boxes of their tensors, wherever they begin and end, and however tensor ranks cut the tensor."""

from __future__ import annotations

import math

import pytest
import torch

from polyreme_trainer.checkpoint.content import FlatTensors
from polyreme_trainer.checkpoint.shards import HeldTensor, ShardAxis, TensorShard, boxes
from polyreme_trainer.model.sharding import Cut, cut_of, slice_of
from polyreme_trainer.parallel.flat_buffers import FlatParameters
from polyreme_trainer.parallel.flat_layout import Shares


@pytest.mark.parametrize("shape", [(7,), (3, 5), (2, 3, 4), (2, 1, 3, 2)])
def test_boxes_of_every_run_hold_its_scalars_in_order(shape: tuple[int, ...]) -> None:
    numbers = torch.arange(math.prod(shape)).view(shape)
    for begin in range(numbers.numel()):
        for end in range(begin + 1, numbers.numel() + 1):
            found = boxes(shape, begin, end)
            seen = [
                number
                for box in found
                for number in numbers[
                    tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))
                ]
                .flatten()
                .tolist()
            ]
            assert seen == list(range(begin, end))
            assert len(found) <= 2 * len(shape) - 1


def test_two_axes_cut_two_dimensions() -> None:
    rows, columns = (ShardAxis(mesh, Cut(dim=dim), 0, 2) for mesh, dim in (("tensor", 0), ("expert", 1)))
    assert TensorShard(name="gate", axes=(rows, columns)).whole_shape((3, 4)) == (6, 8)
    with pytest.raises(ValueError, match="two axes cut dimension"):
        TensorShard(name="gate", axes=(rows, rows._replace(mesh="expert")))


@pytest.mark.parametrize("name", ["layers.0.self_attn.o_proj.weight", "blocks.0.wqkv.weight", "norm.weight"])
def test_pieces_of_all_ranks_fill_the_whole_tensor_once(name: str) -> None:
    whole = torch.arange(24 * 8, dtype=torch.float32).view(24, 8)
    cut, tensor_ranks, copies = cut_of(name), 2, 3
    filled = torch.full_like(whole, -1.0)
    for place in range(tensor_ranks if cut else 1):
        own = whole if cut is None else slice_of(whole, cut, place=place, parts=tensor_ranks)
        for copy in range(copies):
            flat = FlatParameters(
                [(name, torch.nn.Parameter(own.clone()))], shares=Shares(count=copies, place=copy, bucket_scalars=48)
            )
            axes = (ShardAxis("tensor", cut, place, tensor_ranks),) if cut else ()
            buffer = torch.cat([piece.of(flat.values) for piece in flat.pieces])
            held = FlatTensors(
                prefix="model",
                slots=flat.slots,
                buffer=buffer,
                shards=[TensorShard(name=name, axes=axes)],
                pieces=flat.pieces,
            )
            for found, pieces in held.tensors():
                assert found == f"model.{name}"
                assert isinstance(pieces, HeldTensor)
                assert pieces.size() == whole.shape
                for offsets, box in pieces.held:
                    target = filled[tuple(slice(at, at + size) for at, size in zip(offsets, box.shape, strict=True))]
                    assert bool((target == -1.0).all()), "no scalar is held twice"
                    target.copy_(box)
    assert torch.equal(filled, whole)
