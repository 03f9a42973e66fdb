"""``polyreme plan --slow-device``: bits with which a slow device keeps pace with those that a job names."""

from __future__ import annotations

from collections import Counter

import typer

from polyreme.views.output import Format, emit
from polyreme_api.errors import InvalidConfigError
from polyreme_planner.costs import Setting
from polyreme_planner.hardware import GIB, HARDWARE
from polyreme_planner.layout import packs_of_rank
from polyreme_planner.mixed_precision import STATE_BYTES, VARIANCE, WIDTHS, precision_for
from polyreme_planner.model_parts import parameter_count

SLOW = typer.Option(
    "--slow-device",
    help="Plan the bits of each layer with which this device would train in step with the job's.",
    rich_help_panel="A slow device",
)
CHOSEN = [
    ("slow device", "device"),
    ("bits of layers", "bits"),
    ("step seconds", "stepSeconds"),
    ("of seconds", "limitSeconds"),
    ("memory GiB", "memoryGiB"),
    ("of GiB", "usableGiB"),
    ("error of 8 bits everywhere", "error"),
]


def keep_pace(setting: Setting, slow: str, *, ranks: int, packs_per_step: int, output: Format) -> None:
    """Plan and print.

    Args:
        setting: The job's model and hardware.
        slow: Name of the slow device.
        ranks: Of the job, each with a copy of the model.
        packs_per_step: Of all ranks.
        output: Table or JSON.

    Raises:
        InvalidConfigError: If the device is not known, or too small.
    """
    if slow not in HARDWARE:
        raise InvalidConfigError(f"unknown device: {slow!r}, known are {', '.join(HARDWARE)}", field="--slow-device")
    shape, device = setting.shape, HARDWARE[slow]
    shared = ranks if setting.numerics.sharded_parameters else 1
    found = precision_for(
        shape,
        setting.mix,
        slow=device,
        fast=setting.hardware,
        packs=packs_of_rank(packs_per_step, ranks),
        state_bytes=STATE_BYTES * parameter_count(shape) / shared,
    )
    lowest = VARIANCE[WIDTHS[0]] * shape.decoder.layers
    emit(
        "SlowDevicePlan",
        {
            "device": slow,
            "bits": list(found.widths)
            if output is Format.JSON
            else ", ".join(f"{count} x {bits}" for bits, count in sorted(Counter(found.widths).items())),
            "stepSeconds": round(found.step_s, 6),
            "limitSeconds": round(found.limit_s, 6),
            "memoryGiB": round(found.memory_bytes / GIB, 2),
            "usableGiB": round(device.usable_bytes / GIB, 2),
            "error": round(found.variance / lowest, 4),
        },
        output=output,
        columns=CHOSEN,
    )
