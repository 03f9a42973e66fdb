"""Flash kernels of an accelerator: the newest that torch can call here.

Packs and tiles of a ring call torch's ``_flash_attention_forward`` alone, so what is activated serves both. Its own
kernels are FlashAttention 2; FlashAttention 3 is faster on Hopper, and comes with the package ``flash_attn_interface``.
cuDNN's kernel takes values that are narrower than keys without padding and was twice as fast on an H200, but torch's
binding of it is wrong for documents of different lengths (2.13, ADR 81), so it is not used. Whatever kernel runs,
``make test-device`` compares it with a processor.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable

from torch.nn.attention import activate_flash_attention_impl, list_flash_attention_impls

HOPPER = 9
"""Compute capability, first number, of the devices that FlashAttention 3 was written for."""
NEWEST, PACKAGE = "FA3", "flash_attn_interface"
OWN = "FA2"


def flash_kernels(capability: tuple[int, int], *, installed: Callable[[str], bool], known: list[str]) -> str:
    """Choose kernels for a device.

    Args:
        capability: Of the device.
        installed: Whether a package is.
        known: What this torch can call.
    """
    return NEWEST if capability[0] == HOPPER and NEWEST in known and installed(PACKAGE) else OWN


def use_newest_flash(capability: tuple[int, int]) -> str:
    """Activate the newest kernels for the device of this process; returns their name.

    Raises:
        RuntimeError: If the package is there and does not hold the kernels.
    """
    chosen = flash_kernels(
        capability,
        installed=lambda package: importlib.util.find_spec(package) is not None,
        known=list_flash_attention_impls(),
    )
    if chosen != OWN:
        activate_flash_attention_impl(chosen)
    return chosen
