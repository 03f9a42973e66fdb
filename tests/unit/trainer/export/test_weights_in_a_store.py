"""Weights in a store equal those of a folder, read by ranges; a truncated file is refused with the same message."""

from __future__ import annotations

import json
import pathlib
import struct
from collections.abc import Callable

import pytest
import torch

from polyreme_api.errors import InvalidConfigError, NotFoundError
from polyreme_datahub.objects import open_store
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.vlm import KimiVL
from polyreme_trainer.weights import locations
from polyreme_trainer.weights.catalogue import read_catalogue
from polyreme_trainer.weights.compatibility import check_fit
from polyreme_trainer.weights.load import load_weights
from polyreme_trainer.weights.locations import StoredFolder
from polyreme_trainer.weights.slices import Place, Rows
from tests.unit.datahub.stores import PassingStore
from tests.unit.trainer.export.reading import assert_equal, read_back


class Counting(PassingStore):
    """Keeps the lengths of the ranges that were asked for."""

    def __init__(self, url: str) -> None:
        super().__init__(open_store(url))
        self.lengths: list[int] = []

    def get_range(self, key: str, *, start: int, length: int) -> bytes:
        self.lengths.append(length)
        return super().get_range(key, start=start, length=length)


def test_a_store_gives_what_its_folder_gives(model: KimiVL, exported: pathlib.Path) -> None:
    assert_equal(model.state_dict(), read_back(StoredFolder(open_store(exported.as_uri()), exported.as_uri())))


def test_rows_of_a_slice_are_read_by_ranges_and_nothing_else(
    exported: pathlib.Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(locations, "READ_BYTES_MAX", 10_000)
    store = Counting(exported.as_uri())
    catalogue = read_catalogue(StoredFolder(store, "s3://weights"))
    names, place = check_fit(catalogue, KIMI_VL_NANO), Place(experts=range(0), tensor=1, tensor_parts=2)
    headers = sum(store.lengths)
    name = "language_model.model.embed_tokens.weight"
    rows, columns = catalogue.tensors[name].shape
    own = torch.empty(100, columns)
    load_weights({name: Rows(own=own, first=20, rows=rows // 2)}, catalogue, names, place)
    whole = read_back(exported)[name]
    assert torch.equal(own, whole[rows // 2 + 20 : rows // 2 + 120])
    assert sum(store.lengths) - headers == own.nbytes
    assert max(store.lengths) <= 10_000
    name = "language_model.model.layers.0.self_attn.o_proj.weight"  # cut by columns: all of its rows come
    rows, columns = catalogue.tensors[name].shape
    own = torch.empty(10, columns // 2)
    load_weights({name: Rows(own=own, first=5, rows=rows)}, catalogue, names, place)
    assert torch.equal(own, read_back(exported)[name][5:15, columns // 2 :])


@pytest.mark.parametrize(
    ("harm", "words"),
    [
        (lambda whole: whole[:-1], "its tensors end at byte"),
        (lambda whole: whole[:5], "its header would have"),
        (lambda whole: struct.pack("<Q", 1 << 40) + whole[8:], "its header would have 1099511627776 bytes"),
        (lambda whole: whole[:8] + b"?" + whole[9:], "its header can't be read"),
        (lambda whole: whole + b"more", "its tensors end at byte"),
    ],
    ids=["cut short", "nearly empty", "of another length", "no JSON", "too long"],
)
def test_what_is_no_whole_file_is_refused_by_name(
    tmp_path: pathlib.Path, harm: Callable[[bytes], bytes], words: str
) -> None:
    header = json.dumps({"lm_head.weight": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}}).encode()
    whole = struct.pack("<Q", len(header)) + header + bytes(24)
    (tmp_path / "model.safetensors").write_bytes(harm(whole))
    with pytest.raises(InvalidConfigError, match=r"weights file can't be read: s3://w/model\.safetensors") as refused:
        read_catalogue(StoredFolder(open_store(tmp_path.as_uri()), "s3://w/"))
    assert words in refused.value.message


def test_holes_between_tensors_are_refused(tmp_path: pathlib.Path) -> None:
    tensors = {
        "one": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]},
        "two": {"dtype": "F32", "shape": [1], "data_offsets": [8, 12]},
    }
    header = json.dumps(tensors).encode()
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + bytes(12))
    with pytest.raises(InvalidConfigError, match=r"its tensors are not contiguous"):
        read_catalogue(StoredFolder(open_store(tmp_path.as_uri()), "s3://w"))


def test_a_store_without_weights_is_not_found(tmp_path: pathlib.Path) -> None:
    with pytest.raises(NotFoundError, match=r"no weights: s3://w is not a folder"):
        read_catalogue(StoredFolder(open_store(tmp_path.as_uri()), "s3://w"))
