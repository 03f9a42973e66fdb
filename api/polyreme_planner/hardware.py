"""Hardware that a plan is made for: devices, their memory and speed, the links between them, and the width of numbers.

Rates are what the parts of a step reach, not what a data sheet promises: peak x a share that is written beside it.
Times that the trainer measured replace them (``costs.Measured``).
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from typing import Literal

from polyreme_api.errors import InvalidConfigError

GIB = 2**30
SHARED_MEMORY_BYTES_MIN = 256 << 20
"""Of ``/dev/shm`` where ranks of several devices share a machine or a pod: NCCL exchanges by it where devices are not
linked. A container's default is 64 MiB."""
MEMORY_SHARE = 0.8
"""Part of the memory's rate by the data sheet that is reached."""
Precision = Literal["float32", "bfloat16"]
"""Type of numbers in which a model computes."""
FLOAT32_BYTES = 4
PROCESSOR = "cpu"
"""The hardware without an accelerator."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Numerics:
    """Bytes of each number that a rank holds."""

    weight_bytes: int = 4
    gradient_bytes: int = 4
    optimizer_bytes: int = 8
    """Moments of AdamW, and the float32 weight if the working one is narrower."""
    matrix_optimizer_bytes: int | None = None
    """The same of a matrix that Muon updates, with one moment; None: all are AdamW's."""
    activation_bytes: int = 4
    sharded_optimizer: bool = False
    """Whether the ranks that hold the same weights shard their moments (ZeRO-1, arXiv:1910.02054)."""
    sharded_parameters: bool = False
    """Whether they hold rows of them, and gather a layer when it runs (FSDP2)."""
    weight_copies: int = 1
    """Copies of the weights that are trained: a second one is the reference of pairs that are scored in each step."""

    @property
    def precision(self) -> Precision:
        """Type in which the model computes."""
        return "float32" if self.activation_bytes == FLOAT32_BYTES else "bfloat16"


FLOAT32 = Numerics()
"""float32 throughout, and each rank with the moments of all that it holds."""
MIXED = Numerics(weight_bytes=2, gradient_bytes=4, optimizer_bytes=12, activation_bytes=2, sharded_optimizer=True)
"""bfloat16 with float32 gradients and originals, state sharded: the usual choice of large runs."""


class Pattern(enum.StrEnum):
    """Communication pattern of an exchange."""

    ALL_TO_ALL = "all-to-all"
    """Each rank to every other, evenly."""
    RING = "ring"
    """Each rank to the next."""
    REDUCE = "reduce"
    """Gathers, scatters and sums: a ring in which each link of a node carries its share (NCCL)."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Ranks that exchange: so many, each ``stride`` from the next in the order of ranks."""

    ranks: int
    stride: int

    def of_node(self, near_devices: int) -> int:
        """Members that share a node of so many devices."""
        return min(self.ranks, max(1, near_devices // self.stride))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Hardware:
    """One kind of device in one kind of cluster."""

    name: str
    memory_bytes: int
    """Of one device."""
    usable_share: float = 0.9
    """Share of the memory that a plan may fill; the rest is for the driver and for fragments."""
    peak_flops_per_s: float
    """Of matrix products in bfloat16, by the data sheet."""
    flops_per_s: float
    """Of matrix products, as reached."""
    bytes_per_s: float
    """Of the device's memory, as reached."""
    near_devices: int
    """Devices that the near link joins."""
    near_bytes_per_s: float
    """Of the link inside a node, one direction, as reached."""
    far_bytes_per_s: float
    """Of a device's share of the network between nodes, as reached."""
    near_latency_s: float
    far_latency_s: float
    float32_share: float = 1.0
    """Speed of float32 products, relative to bfloat16."""
    tf32_share: float = 1.0
    """Speed of float32 products whose inputs are rounded to TF32, relative to bfloat16."""
    launch_s: float = 0.0
    """Of a kernel, from its predecessor's end: a fixed cost."""
    device_name: str = ""
    """Word of the name that a device reports; empty for processors, and for devices that only plans are made for."""
    in_memory: bool = False
    """Whether products run inside the memory's banks: every token reads its weights again, in bfloat16 only."""

    def is_called(self, name: str) -> bool:
        """Return whether a device that reports this name is one of these: an H200 is no H20."""
        return bool(self.device_name) and self.device_name in name.replace("-", " ").split()

    def at(self, precision: Precision, *, tf32: bool = False) -> Hardware:
        """Return this hardware with the speed of products in a precision; it is given for bfloat16."""
        if precision == "bfloat16":
            return self
        share = self.tf32_share if tf32 else self.float32_share
        peak, reached = share * self.peak_flops_per_s, share * self.flops_per_s
        return dataclasses.replace(self, peak_flops_per_s=peak, flops_per_s=reached)

    @property
    def usable_bytes(self) -> int:
        """Memory that a plan may fill."""
        return int(self.memory_bytes * self.usable_share)

    def exchange_s(
        self,
        sent_bytes: float,
        *,
        group: Group,
        pattern: Pattern,
        messages: int = 1,
        far_bytes: float | None = None,
    ) -> float:
        """Price bytes that one rank sends [seconds].

        Args:
            sent_bytes: All messages together.
            group: The ranks: within ``near_devices`` they share the near link.
            pattern: Communication pattern. In a ring the slowest link sets the pace; of an all-to-all both links carry
                their part at once; a reduction enters and leaves a node over the network of each of its members.
            messages: Each costs a latency.
            far_bytes: Bytes of an all-to-all that leave the node; None for an even spread.
        """
        if group.ranks * group.stride <= self.near_devices:
            return sent_bytes / self.near_bytes_per_s + messages * self.near_latency_s
        members = group.of_node(self.near_devices)
        latency_s = messages * self.far_latency_s
        if pattern is Pattern.RING:
            return sent_bytes / self.far_bytes_per_s + latency_s
        if pattern is Pattern.REDUCE:
            return sent_bytes / min(self.near_bytes_per_s, members * self.far_bytes_per_s) + latency_s
        inside = sent_bytes * (members - 1) / (group.ranks - 1)
        # Data that enters a node once is spread there: all of it passes the near link.
        near, far = (inside, sent_bytes - inside) if far_bytes is None else (sent_bytes, far_bytes)
        return max(near / self.near_bytes_per_s, far / self.far_bytes_per_s) + latency_s


_H100 = Hardware(
    name="h100-80g",
    memory_bytes=80 * GIB,
    peak_flops_per_s=989e12,
    flops_per_s=0.6 * 989e12,
    bytes_per_s=MEMORY_SHARE * 3.35e12,
    near_devices=8,
    near_bytes_per_s=0.8 * 450e9,
    far_bytes_per_s=0.8 * 50e9,
    near_latency_s=10e-6,
    far_latency_s=25e-6,
    float32_share=67 / 989,
    tf32_share=494.7 / 989,
    launch_s=3.8e-6,
    device_name="H100",
)
"""NVIDIA's data sheets, dense: 989 TFLOPS in bf16, 494.7 in TF32, 67 in float32; 3.35 TB/s; NVLink 450 GB/s a
direction; 400 Gb/s of network a device.
Shares reached: 0.6 of products, by which two published runs come out (arXiv:2504.14960; bench-planner: 0.63 and 0.59),
0.8 of memory and links. A launch: 3.8 us from one short kernel to the next (NVIDIA, "Getting Started with CUDA Graphs",
2019). Other devices have the same shares and launches where no measurement is named."""
_A100 = dataclasses.replace(
    _H100,
    name="a100-80g",
    peak_flops_per_s=312e12,
    flops_per_s=0.6 * 312e12,
    bytes_per_s=MEMORY_SHARE * 2.039e12,
    near_bytes_per_s=0.8 * 300e9,
    far_bytes_per_s=0.8 * 25e9,
    float32_share=19.5 / 312,
    tf32_share=156 / 312,
    device_name="A100",
)
"""NVIDIA A100 data sheet (SXM, 80 GB, 2021): 312 TFLOPS in bf16, 156 in TF32, 19.5 in float32; 2,039 GB/s; NVLink
300 GB/s a direction. DGX A100: 200 Gb/s of network a device."""
_H20 = dataclasses.replace(
    _H100,
    name="h20-96g",
    memory_bytes=96 * GIB,
    peak_flops_per_s=148e12,
    flops_per_s=0.6 * 148e12,
    bytes_per_s=MEMORY_SHARE * 4.0e12,
    float32_share=44 / 148,
    tf32_share=74 / 148,
    device_name="H20",
)
"""NVIDIA's figures for H20 (as published by SemiAnalysis, 9 November 2023): 148 TFLOPS in bf16, 74 in TF32, 44 in
float32; 96 GB, 4.0 TB/s; the links of H100."""
_B200 = dataclasses.replace(
    _H100,
    name="b200-180g",
    memory_bytes=int(180e9),
    peak_flops_per_s=2250e12,
    flops_per_s=0.6 * 2250e12,
    bytes_per_s=MEMORY_SHARE * 8e12,
    near_bytes_per_s=0.8 * 900e9,
    float32_share=75 / 2250,
    tf32_share=1125 / 2250,
    device_name="B200",
)
"""NVIDIA HGX B200 and DGX B200 data sheets (2024), dense, an eighth of the node: 2,250 TFLOPS in bf16, half of it in
TF32, 75 in float32; 180 GB, 8 TB/s; NVLink 900 GB/s a direction; 400 Gb/s of network a device."""
_MI300X = dataclasses.replace(
    _H100,
    name="mi300x-192g",
    memory_bytes=int(192e9),
    peak_flops_per_s=1307.4e12,
    flops_per_s=0.4 * 1307.4e12,
    bytes_per_s=MEMORY_SHARE * 5.3e12,
    near_bytes_per_s=0.8 * 448e9,
    float32_share=163.4 / 1307.4,
    tf32_share=653.7 / 1307.4,
    device_name="MI300X",
)
"""AMD Instinct MI300X data sheet (2023), dense: 1,307.4 TFLOPS in bf16, 653.7 in TF32, 163.4 in float32 (matrix);
192 GB, 5.3 TB/s; seven links of 64 GB/s a direction, one to each other device of a node. 400 Gb/s of network a device.
Share of products 0.4: they reach 620 TFLOPS where H100's reach 720 (SemiAnalysis, 22 December 2024)."""
_ASCEND_910B = dataclasses.replace(
    _H100,
    name="ascend-910b-64g",
    memory_bytes=64 * GIB,
    peak_flops_per_s=313e12,
    flops_per_s=0.6 * 313e12,
    bytes_per_s=MEMORY_SHARE * 1.6e12,
    near_bytes_per_s=0.8 * 196e9,
    far_bytes_per_s=0.8 * 25e9,
    float32_share=75 / 313,
    tf32_share=75 / 313,
    device_name="",
)
"""Huawei's Atlas 800T A2, an eighth of the server: 313 TFLOPS in 16 bits, 75 in float32; 64 GB; HCCS 392 GB/s in both
directions, 200 Gb/s of network a device. Memory 1.6 TB/s, as a die of the 910C (arXiv:2506.12708). Plans only: the
trainer does not run on it."""
_L40S = dataclasses.replace(
    _H100,
    name="l40s-48g",
    memory_bytes=int(48e9),
    peak_flops_per_s=362.05e12,
    flops_per_s=0.6 * 362.05e12,
    bytes_per_s=MEMORY_SHARE * 864e9,
    near_bytes_per_s=0.8 * 32e9,
    far_bytes_per_s=0.8 * 25e9,
    float32_share=91.6 / 362.05,
    tf32_share=183 / 362.05,
    device_name="",
)
"""NVIDIA L40S data sheet (2023), dense: 362.05 TFLOPS in bf16, 183 in TF32, 91.6 in float32; 48 GB, 864 GB/s; PCIe 4
x16, 32 GB/s a direction, no NVLink. 200 Gb/s of network a device is assumed. Plans only."""
_L4 = dataclasses.replace(
    _L40S,
    name="l4-24g",
    memory_bytes=int(24e9),
    peak_flops_per_s=121e12,
    flops_per_s=0.6 * 121e12,
    bytes_per_s=MEMORY_SHARE * 300e9,
    float32_share=30.3 / 121,
    tf32_share=60 / 121,
)
"""NVIDIA L4 data sheet (2023), half of its figures with sparsity: 121 TFLOPS in bf16, 60 in TF32, 30.3 in float32;
24 GB, 300 GB/s; PCIe 4 x16. 200 Gb/s of network a device is assumed. Plans only."""
HARDWARE: Mapping[str, Hardware] = {
    hardware.name: hardware
    for hardware in (
        _H100,
        _A100,
        _H20,
        _B200,
        _MI300X,
        _ASCEND_910B,
        _L40S,
        _L4,
        # The same except for its memory: 4.8 TB/s.
        dataclasses.replace(
            _H100, name="h200-141g", memory_bytes=int(141e9), bytes_per_s=MEMORY_SHARE * 4.8e12, device_name="H200"
        ),
        # A rank on one core of a small machine, float32 (two products of 16 a cycle at 3 GHz); gloo on loopback: a
        # collective takes milliseconds however small it is.
        Hardware(
            name=PROCESSOR,
            memory_bytes=4 * GIB,
            peak_flops_per_s=100e9,
            flops_per_s=20e9,
            bytes_per_s=5e9,
            near_devices=64,
            near_bytes_per_s=0.5e9,
            far_bytes_per_s=0.1e9,
            near_latency_s=3e-3,
            far_latency_s=5e-3,
        ),
    )
}
_PIM_BANKS = 8 * 16
_PIM_ROW_BYTES = 2048
_PIM_ROW_CYCLE_S = (28 + _PIM_ROW_BYTES // 32 + 16) * 1e-9
IN_MEMORY: Mapping[str, Hardware] = {
    "pim-gpt-4g": Hardware(
        name="pim-gpt-4g",
        memory_bytes=4 * GIB,
        peak_flops_per_s=_PIM_BANKS * 16 * 2 * 1e9,
        flops_per_s=_PIM_BANKS * _PIM_ROW_BYTES / _PIM_ROW_CYCLE_S,
        bytes_per_s=_PIM_BANKS * _PIM_ROW_BYTES / _PIM_ROW_CYCLE_S,
        near_devices=1,
        near_bytes_per_s=0.8 * 32e9,
        far_bytes_per_s=0.8 * 25e9,
        near_latency_s=10e-6,
        far_latency_s=25e-6,
        in_memory=True,
    )
}
"""Memory that computes, for plans of serving only. PIM-GPT (arXiv:2310.09385): eight GDDR6 channels of 4 Gb, 16 banks
each, a bank with 16 multipliers of bfloat16 at 1 GHz. A row of 2,048 B takes 28 ns to open, 1 ns for each 32 B and 16
ns to close (preset GDDR6_AiM_timing of arkhadem/aim_simulator: 56, 2 and 32 cycles of 0.5 ns). A weight of two bytes
is two operations, so both rates are one number. Its links are assumed to be L40S's."""
DEFAULT = _H100.name
"""Assumed hardware for devices of a resource that is not polyreme's own."""


def hardware_named(name: str) -> Hardware:
    """Look a kind of hardware up.

    Raises:
        InvalidConfigError: If it is not known.
    """
    if name not in HARDWARE:
        raise InvalidConfigError(
            f"unknown hardware: {name!r}, known are {', '.join(sorted(HARDWARE))}", field="--hardware"
        )
    return HARDWARE[name]
