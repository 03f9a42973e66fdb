"""A rank reads the ranges that it needs, verifies them, and reports where they differ from what was written."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from polyreme_api.blocks import BLOCK_BYTES
from polyreme_api.errors import RefusedError
from polyreme_api.store import ObjectInfo, ObjectStore
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.checkpoint.block_io import DamagedError
from polyreme_trainer.checkpoint.content import Content
from polyreme_trainer.checkpoint.load import load_checkpoint, open_checkpoint
from tests.unit.datahub.stores import PassingStore
from tests.unit.trainer.checkpoint.conftest import equal, make_content, save

ROWS, COLUMNS = 768, 2048
"""A tensor of 6 MiB."""


class NotedReads(PassingStore):
    """Counts the bytes that are read by ranges, and may flip a bit of some of the first reads."""

    def __init__(self, store: ObjectStore, *, flips: int = 0) -> None:
        super().__init__(store)
        self.bytes_read, self._flips = 0, flips

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        data = super().get_range(key, start=start, length=length)
        self.bytes_read += len(data)
        if self._flips and key.endswith(".bin"):
            self._flips -= 1
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        return super().list(prefix)


def load(store: ObjectStore, name: str, content: Content, group: dist.ProcessGroup) -> None:
    load_checkpoint(content, open_checkpoint(store, name, KIMI_VL_NANO), store, name, group=group)


def test_half_of_each_tensor_is_read_by_half_of_the_bytes(root: ObjectStore, group: dist.ProcessGroup) -> None:
    whole = make_content(1, rows=ROWS, columns=COLUMNS)
    name = save(root, group, whole)
    for place in (0, 1):
        store = NotedReads(root)
        held = make_content(7, rows=ROWS, columns=COLUMNS, place=place, parts=2)
        load(store, name, held, group)
        assert equal(held, make_content(1, rows=ROWS, columns=COLUMNS, place=place, parts=2))
        size = sum(buffer.nbytes for buffer in whole.buffers())
        assert store.bytes_read < size * 0.8, "half, and at most a block at each end of a range"


def test_slices_are_put_together_to_whole_tensors(root: ObjectStore, group: dist.ProcessGroup) -> None:
    name = save(root, group, make_content(1, place=0, parts=1))
    held = make_content(7, place=2, parts=3)
    load(root, name, held, group)
    assert equal(held, make_content(1, place=2, parts=3))


def test_a_flipped_bit_is_named_with_its_file_and_block(root: ObjectStore, group: dist.ProcessGroup) -> None:
    name = save(root, group, make_content(1, rows=ROWS, columns=COLUMNS))
    key = f"{name}/00000-000.bin"
    data = bytearray(root.get(key))
    data[3 * BLOCK_BYTES + 17] ^= 8
    root.put(key, bytes(data))
    with pytest.raises(
        DamagedError, match=rf"00000-000\.bin: bytes from {3 * BLOCK_BYTES}: expected crc32 [0-9a-f]{{8}}"
    ):
        load(root, name, make_content(7, rows=ROWS, columns=COLUMNS), group)


@pytest.mark.parametrize(
    ("file", "data", "words"),
    [
        ("00000-000.bin", b"short", r"00000-000\.bin: it has 5 bytes, expected"),
        ("00000-000.bin", None, r"00000-000\.bin: it is missing"),
        ("INDEX.json", b"{}", r"INDEX\.json: it has 2 bytes"),
    ],
)
def test_what_is_cut_short_or_gone_is_named(
    root: ObjectStore, group: dist.ProcessGroup, file: str, data: bytes | None, words: str
) -> None:
    name = save(root, group, make_content(1))
    root.delete(f"{name}/{file}") if data is None else root.put(f"{name}/{file}", data)
    with pytest.raises(DamagedError, match=words):
        load(root, name, make_content(7), group)


def test_a_bit_that_flips_on_the_way_once_is_read_again(root: ObjectStore, group: dist.ProcessGroup) -> None:
    name = save(root, group, make_content(1))
    held = make_content(7)
    load(NotedReads(root, flips=1), name, held, group)
    assert equal(held, make_content(1))
    with pytest.raises(DamagedError):
        load(NotedReads(root, flips=2), name, make_content(7), group)


def test_another_size_or_type_or_a_name_that_is_missing_is_refused(root: ObjectStore, group: dist.ProcessGroup) -> None:
    name = save(root, group, make_content(1))
    with pytest.raises(RefusedError, match=r"checkpoint does not fit: .*Size mismatch"):
        load(root, name, make_content(7, rows=12), group)
    other = make_content(7)
    half = Content(flat=[], plain={"router_bias.0": other.plain["router_bias.0"].half()})
    with pytest.raises(RefusedError, match=r"router_bias\.0 is torch\.float32, this run has torch\.float16"):
        load(root, name, half, group)
    more = Content(flat=[], plain={"router_bias.9": torch.zeros(8)})
    with pytest.raises(RefusedError, match=r"lacks tensors: .* has no router_bias\.9, the first of 1"):
        load(root, name, more, group)


def test_state_of_another_optimizer_is_refused_in_one_sentence(root: ObjectStore, group: dist.ProcessGroup) -> None:
    name = save(root, group, make_content(1))
    weights, moments = make_content(7).flat
    other = Content(flat=[weights, dataclasses.replace(moments, prefix="optimizer.momentum")], plain={})
    with pytest.raises(RefusedError) as refused:
        load(root, name, other, group)
    assert refused.value.message.startswith(
        f"checkpoint was written with another optimizer: {name} has no optimizer.momentum.layer.0.w, the first of 5 "
    )
    assert refused.value.field == "spec.training.optimizer.name"


def test_types_of_two_bytes_and_tensors_without_elements_come_back(root: ObjectStore, group: dist.ProcessGroup) -> None:
    def content(seed: int) -> Content:
        draw = torch.Generator().manual_seed(seed)
        plain = {
            "a": torch.rand(33, generator=draw).bfloat16(),
            "b": torch.randint(9, (3, 5), generator=draw),
            "c": torch.tensor(float(seed)),
            "d": torch.empty(0, 4),
        }
        return Content(flat=[], plain=plain)

    name = save(root, group, content(1))
    held = content(7)
    load(root, name, held, group)
    assert equal(held, content(1))
