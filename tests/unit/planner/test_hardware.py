"""Hardware: its table, names of devices, and rows of a user's own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.hardware import HARDWARE, PROCESSOR
from polyreme_planner.hardware_file import HARDWARE_FORMAT, hardware_from_json

ACCELERATORS = [hardware for name, hardware in HARDWARE.items() if name != PROCESSOR]
NAMES = {
    "a100-80g": "NVIDIA A100-SXM4-80GB",
    "h20-96g": "NVIDIA H20",
    "h100-80g": "NVIDIA H100 80GB HBM3",
    "h200-141g": "NVIDIA H200",
    "b200-180g": "NVIDIA B200",
    "mi300x-192g": "AMD Instinct MI300X OAM",
}


@pytest.mark.parametrize("hardware", ACCELERATORS, ids=lambda hardware: hardware.name)
def test_what_is_reached_is_less_than_what_is_published(hardware: Any) -> None:
    assert 0.3 <= hardware.flops_per_s / hardware.peak_flops_per_s < 1
    assert 0 < hardware.float32_share <= hardware.tf32_share < 1
    assert hardware.far_bytes_per_s < hardware.near_bytes_per_s < hardware.bytes_per_s
    size = int(hardware.name.rpartition("-")[2].removesuffix("g"))
    assert hardware.memory_bytes in (size * 10**9, size * 2**30)


def test_a_device_is_known_by_a_whole_word_of_its_name() -> None:
    for name, reported in NAMES.items():
        assert [other for other, of in HARDWARE.items() if of.is_called(reported)] == [name]
    assert not any(of.is_called("NVIDIA GB200") for of in HARDWARE.values())


def row(**changes: Any) -> str:
    return json.dumps({"format": HARDWARE_FORMAT, "name": "mine", "like": "h100-80g"} | changes)


def test_a_row_of_ones_own_takes_what_it_lacks_from_the_row_it_is_like() -> None:
    mine = hardware_from_json(row(farBytesPerS=1e10, nearDevices=4))
    assert (mine.name, mine.far_bytes_per_s, mine.near_devices) == ("mine", 1e10, 4)
    assert mine.flops_per_s == HARDWARE["h100-80g"].flops_per_s


def test_a_row_of_ones_own_may_name_all_figures() -> None:
    figures = {
        "memoryBytes": 48e9, "peakFlopsPerS": 1e14, "flopsPerS": 5e13, "bytesPerS": 1e12, "nearDevices": 8,
        "nearBytesPerS": 3e10, "farBytesPerS": 1e10, "nearLatencyS": 0, "farLatencyS": 2e-5,
    }  # fmt: skip
    data = {"format": HARDWARE_FORMAT, "name": "mine"}
    mine = hardware_from_json(json.dumps(data | figures))
    assert (mine.memory_bytes, mine.usable_share, mine.launch_s) == (48_000_000_000, 0.9, 0.0)
    with pytest.raises(InvalidConfigError, match="farLatencyS is missing, and no like names a row"):
        hardware_from_json(json.dumps(data | {key: value for key, value in figures.items() if key != "farLatencyS"}))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "Expecting property name"),
        ("[]", "no object with format"),
        (row(format="other"), "no object with format 'polyreme.dev/hardware/v1'"),
        (row(like="tpu"), "like 'tpu' is not an accelerator of the table: h100-80g"),
        (row(like=["a"]), "like .'a'. is not an accelerator"),
        (row(name="h100-80g"), "name 'h100-80g' is missing or that of a row"),
        (row(name=None), "name is None, expected a text"),
        (row(flops=1), "unknown figure 'flops', figures are name, memoryBytes"),
        (row(flopsPerS="fast"), "flopsPerS is 'fast', expected a number"),
        (row(flopsPerS=0), "flopsPerS is 0, expected more than 0"),
        (row(usableShare=90), "usableShare is 90, expected at most 1"),
    ],
)
def test_a_bad_file_is_refused_in_one_sentence(text: str, words: str) -> None:
    with pytest.raises(InvalidConfigError, match=words) as refused:
        hardware_from_json(text)
    assert refused.value.field == "--hardware-file"
    assert "\n" not in refused.value.message
