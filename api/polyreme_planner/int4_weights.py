"""Weights of answers: as the model holds them, or the decoder's products in 4 bits."""

from __future__ import annotations

import enum

from polyreme_api.errors import InvalidConfigError

GROUP = 32
"""Inputs that share a scale: the fewest that torch takes, so the least error, and the most shapes that fit."""
GROUPS = (32, 64, 128)
"""Groups that torch's product takes."""
OUTPUTS = 16
"""torch packs so many outputs together."""


class WeightsKind(enum.StrEnum):
    """How the weights that answer are held."""

    AUTO = "Auto"
    """As the model holds them."""
    INT4 = "Int4"
    """The decoder's products rounded to 4 bits by groups of inputs."""


def check_device(device_type: str, *, field: str = "") -> None:
    """Refuse weights in 4 bits on an accelerator.

    Raises:
        InvalidConfigError: If the device is one.
    """
    if device_type != "cpu":
        raise InvalidConfigError(
            f"weights in 4 bits answer on processors alone, not on {device_type}, where torch's product takes another "
            "packing, which has not been tried; take Auto",
            field=field,
        )


def packs(outputs: int, inputs: int, group: int = GROUP) -> bool:
    """Whether a matrix can be held in 4 bits."""
    return not outputs % OUTPUTS and not inputs % group
