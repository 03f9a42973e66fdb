"""A checkpoint is the same model in every layout, and is refused for another model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from polyreme_api.blocks import BLOCK_BYTES
from tests.roots import damaged

pytestmark = [pytest.mark.parallel, pytest.mark.slow]

NAME = "a000001-s00000003"


Degrees = tuple[int, int] | dict[str, int]


def save(start: Any, root: Path, layout: Degrees = (4, 2)) -> None:
    assert start("train", layout=layout, root=root, steps=3).wait() == [0] * 4


def digests(start: Any, root: Path, layout: Degrees, **request: Any) -> dict[str, str]:
    output = root / "digests.json"
    gang = start("digests", layout=layout, root=root, resume_from=NAME, output=str(output), **request)
    assert set(gang.wait()) == {0}, gang.logs()
    found: dict[str, str] = json.loads(output.read_text())
    return found


def test_a_checkpoint_of_two_expert_slices_loads_bit_for_bit_into_any_layout(start: Any, tmp_path: Path) -> None:
    save(start, tmp_path)
    same = digests(start, tmp_path, (4, 2))
    assert len(set(same.values())) > len(same) // 2, "tensors differ, moments are not all zero"
    layouts: list[Degrees] = [(4, 4), (4, 1), (2, 2), (1, 1), {"dp": 2, "tp": 2, "ep": 4}]
    for layout in layouts:
        assert digests(start, tmp_path, layout) == same, layout


def test_a_checkpoint_of_shared_layers_and_cut_streams_loads_bit_for_bit_into_any_layout(
    start: Any, tmp_path: Path
) -> None:
    shared: Degrees = {"cp": 2, "tp": 2, "ep": 2}
    save(start, tmp_path, shared)
    same = digests(start, tmp_path, shared)
    assert len(set(same.values())) > len(same) // 2, "tensors differ, moments are not all zero"
    layouts: list[Degrees] = [{"tp": 4, "ep": 4}, {"dp": 2, "cp": 2}, (1, 1)]
    for layout in layouts:
        assert digests(start, tmp_path, layout) == same, layout
    rows: list[Degrees] = [shared, {"dp": 3}]
    for layout in rows:  # of slices, and such that some ranks have fewer of
        assert digests(start, tmp_path, layout, parameter_sharding="FSDP2") == same, layout


def test_a_damaged_checkpoint_is_refused_by_all_ranks_and_the_file_is_named(start: Any, tmp_path: Path) -> None:
    save(start, tmp_path)
    victim = tmp_path / NAME / "00001-000.bin"
    content = bytearray(victim.read_bytes())
    content[len(content) // 2] ^= 1
    victim.write_bytes(content)
    gang = start("train", layout=(4, 2), attempt=2, resume_from=NAME, steps=4)
    assert gang.wait() == [7] * 4
    where = f"bytes from {len(content) // 2 // BLOCK_BYTES * BLOCK_BYTES}: expected crc32"
    for rank in range(4):
        assert f"checkpoint is damaged: {NAME}: 00001-000.bin: {where}" in (tmp_path / f"rank-{rank}.log").read_text()
    assert NAME in damaged(tmp_path), "no later attempt begins there"


def test_a_checkpoint_of_another_model_is_refused_with_the_size_that_differs(start: Any, tmp_path: Path) -> None:
    save(start, tmp_path)
    gang = start("train", layout=(2, 2), attempt=2, resume_from=NAME, steps=4, decoder={"layers": 2})
    assert gang.wait() == [4] * 2
    assert f"checkpoint belongs to another model: {NAME} has decoder.layers=3, this run has 2" in gang.logs()


def test_a_checkpoint_of_another_data_order_is_refused(start: Any, tmp_path: Path) -> None:
    save(start, tmp_path)
    gang = start("train", layout=(2, 2), attempt=2, resume_from=NAME, steps=4, data_seed=8)
    assert gang.wait() == [4] * 2
    assert "data order differs" in gang.logs()
