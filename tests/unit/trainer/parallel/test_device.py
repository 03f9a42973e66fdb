"""A plan for other hardware is refused in one sentence; out-of-memory errors are recognised by their message."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.parallel.device import full_memory, take_device


@dataclasses.dataclass
class Card:
    """What torch tells of a device."""

    name: str
    total_memory: int


def cards(monkeypatch: pytest.MonkeyPatch, *seen: Card) -> list[int]:
    taken: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(seen))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(seen))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda number: seen[number])
    monkeypatch.setattr(torch.cuda, "set_device", taken.append)
    monkeypatch.setattr(torch, "set_float32_matmul_precision", precisions.append)
    return taken


precisions: list[str] = []
"""What was set for float32 products, in turn."""
H100 = Card("NVIDIA H100 80GB HBM3", 85_017_755_648)
H200 = Card("NVIDIA H200", 150_754_820_096)


def test_a_plan_for_processors_runs_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = cards(monkeypatch, H200)
    assert take_device("cpu", local_rank=0) == "cpu"
    assert taken == []


def test_a_rank_takes_the_device_of_its_number(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = cards(monkeypatch, H200, H200)
    assert take_device("h200-141g", local_rank=1) == "cuda"
    assert taken == [1]


@pytest.mark.parametrize(("tf32", "precision"), [(False, "highest"), (True, "high")])
def test_float32_products_are_rounded_only_where_the_job_says_so(
    monkeypatch: pytest.MonkeyPatch, tf32: bool, precision: str
) -> None:
    cards(monkeypatch, H100)
    take_device("h100-80g", local_rank=0, tf32=tf32)
    assert precisions[-1] == precision


@pytest.mark.parametrize(
    ("wanted", "seen", "local_rank", "words"),
    [
        ("h100-80g", [], 0, r"for other hardware: h100-80g \(80 GiB\), this rank has only a CPU"),
        ("h200-141g", [H100], 0, r"h200-141g \(131 GiB\), this rank has NVIDIA H100 80GB HBM3 \(79 GiB\)"),
        ("h100-80g", [H200], 0, "this rank has NVIDIA H200"),
        ("h200-141g", [Card("NVIDIA H200 MIG 1g.18gb", 18 << 30)], 0, r"MIG 1g.18gb \(18 GiB\)"),
        ("h100-80g", [H100], 1, "local rank 1 has none of its own: 1 seen"),
        ("abacus", [H100], 0, "unknown hardware: 'abacus'"),
    ],
)
def test_a_plan_for_other_hardware_is_refused(
    monkeypatch: pytest.MonkeyPatch, wanted: str, seen: list[Card], local_rank: int, words: str
) -> None:
    taken = cards(monkeypatch, *seen)
    with pytest.raises(InvalidConfigError, match=words):
        take_device(wanted, local_rank=local_rank)
    assert taken == []


def test_a_full_memory_is_known_and_other_errors_are_not() -> None:
    with pytest.raises(RuntimeError) as full:
        torch.empty(1 << 55, dtype=torch.uint8)
    assert "36028797018963968 bytes" in (full_memory(full.value) or "")
    assert full_memory(MemoryError()) == "MemoryError"
    told = "CUDA out of memory. Tried to allocate 2 GiB. If reserved but unallocated memory is large try ..."
    assert full_memory(torch.OutOfMemoryError(told)) == "CUDA out of memory. Tried to allocate 2 GiB."
    with pytest.raises(RuntimeError) as wrong:
        torch.zeros(2) @ torch.zeros(3)
    assert full_memory(wrong.value) is None
