"""A plan for other hardware is refused in one sentence; out-of-memory errors are recognised by their message."""

from __future__ import annotations

import dataclasses
import itertools
import shutil
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from polyreme_api.errors import EnvironmentFailedError, InvalidConfigError
from polyreme_trainer.parallel.device import (
    FREE_POLL_S,
    FREE_WAIT_S_MAX,
    check_shared_memory,
    full_memory,
    take_device,
)


@dataclasses.dataclass
class Card:
    """What torch tells of a device."""

    name: str
    total_memory: int
    major: int = 9
    minor: int = 0


NO_DRIVER = "Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU and installed a driver"
OLD_DRIVER = (
    "The NVIDIA driver on your system is too old (found version 11040). Please update your GPU driver by downloading "
    "and installing a new version"
)


def failing(words: str) -> None:
    raise RuntimeError(words)


def cards(monkeypatch: pytest.MonkeyPatch, *seen: Card, free: Iterator[int] | None = None) -> list[int]:
    taken: list[int] = []
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(torch.cuda, "init", lambda: None if seen else failing(NO_DRIVER))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda number: (next(free or iter([1 << 40])), 1 << 40))
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
        (
            "h100-80g",
            [],
            0,
            r"for other hardware: h100-80g \(80 GiB\), this rank has only a CPU: Found no NVIDIA driver",
        ),
        ("h200-141g", [H100], 0, r"h200-141g \(131 GiB\), this rank has NVIDIA H100 80GB HBM3 \(79 GiB\)"),
        ("h100-80g", [H200], 0, "this rank has NVIDIA H200"),
        ("h20-96g", [H200], 0, "this rank has NVIDIA H200"),
        ("h200-141g", [Card("NVIDIA H200 MIG 1g.18gb", 18 << 30)], 0, r"MIG 1g.18gb \(18 GiB\)"),
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


def test_hidden_device_is_the_jobs_fault_only_where_the_job_hides_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, H100)
    with pytest.raises(EnvironmentFailedError, match="local rank 1 has no device of its own: CUDA sees 1 on this node"):
        take_device("h100-80g", local_rank=1)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    with pytest.raises(InvalidConfigError, match="CUDA sees 1, CUDA_VISIBLE_DEVICES is 0"):
        take_device("h100-80g", local_rank=1)


def test_driver_that_is_too_old_is_the_machines_fault_in_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    cards(monkeypatch, H100)
    monkeypatch.setattr(torch.cuda, "init", lambda: failing(OLD_DRIVER))
    with pytest.raises(EnvironmentFailedError) as refused:
        take_device("h100-80g", local_rank=0)
    assert refused.value.message == (
        "CUDA can't be used on this machine: The NVIDIA driver on your system is too old (found version 11040)"
    )


def test_rank_waits_for_the_memory_of_a_killed_predecessor_and_not_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[float] = []
    cards(monkeypatch, H100, free=iter([4 << 30, 40 << 30, 78 << 30]))
    assert take_device("h100-80g", local_rank=0, pause=waits.append) == "cuda"
    assert waits == [FREE_POLL_S] * 2
    cards(monkeypatch, H100, free=itertools.repeat(40 << 30))
    with pytest.raises(EnvironmentFailedError, match=r"memory of device 0 is in use: 40.0 GiB are free after 30 s"):
        take_device("h100-80g", local_rank=0, pause=waits.append)
    assert sum(waits) == FREE_WAIT_S_MAX + 2 * FREE_POLL_S


def test_shared_memory_of_a_containers_default_size_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=64 << 20))
    check_shared_memory(1, tmp_path)
    with pytest.raises(InvalidConfigError, match="has 64 MiB, at least 256 MiB are needed"):
        check_shared_memory(8, tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: types.SimpleNamespace(total=1 << 30))
    check_shared_memory(8, tmp_path)


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
