"""Inputs of a job's plan: model, mix of its packs, hardware of its workers, numbers of its ranks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.labels import RESOURCE_DEVICE
from polyreme_planner.adapters import adapters_of
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.curriculum import generation_layout, kinds_of_packs
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import DEFAULT, PROCESSOR, Hardware, Numerics, hardware_named
from polyreme_planner.optimizer_state import divides_update, matrix_state_bytes, state_bytes
from polyreme_planner.precision import precision_of
from polyreme_planner.shapes import ModelShape

IMAGE_PATCHES = 1024
"""Patches of one image if packs are long enough for it: the plan does not know the images."""
VISUAL_SHARE = 0.5
"""Assumed share of the tokens that are image features."""
_UNITS = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12}


def setting_of(spec: TrainingJobSpec, shape: ModelShape, *, pack_tokens: int | None = None) -> Setting:
    """Return the inputs of a job's plan; equal jobs give equal settings.

    Args:
        spec: The job's specification.
        shape: Its model.
        pack_tokens: Tokens of a pack; None for the longest of all curriculum stages.
    """
    tokens = kinds_of_packs(spec)[0].tokens if pack_tokens is None else pack_tokens
    return Setting(
        shape=shape,
        mix=mix_of(shape, tokens),
        hardware=hardware_of(spec),
        numerics=numerics_of(spec, shape),
        adapters=adapters_of(spec.training, shape),
        generation_ep=generation_ep_of(spec),
    )


def generation_ep_of(spec: TrainingJobSpec) -> int | None:
    """Return how many ranks share the experts where answers are drawn in a layout of their own; None: they are not."""
    layout = generation_layout(
        (stage.objective for stage in spec.training.stages or ()), world=spec.workers.replicas * spec.workers.devices
    )
    return None if layout is None else layout.ep


def mix_of(
    shape: ModelShape, pack_tokens: int, *, image_patches: int | None = None, visual_share: float | None = None
) -> Mix:
    """Return the content of a pack; missing values are guessed: half of it images, and none larger than fits there.

    A decoder alone gets no images.
    """
    share = (VISUAL_SHARE if visual_share is None else visual_share) if shape.sees else 0.0
    if image_patches is None:
        image_patches = max(1, min(IMAGE_PATCHES, int(pack_tokens * share) * shape.vision.merge**2))
    return Mix(sequence_tokens=pack_tokens, image_patches=image_patches, visual_share=share)


def hardware_of(spec: TrainingJobSpec, other: str | Hardware | None = None) -> Hardware:
    """Return the hardware that a job names, or assumed for its device resource, at the speed of the job's precision.

    Processors have the memory that the worker's first container is limited to, shared by its ranks.

    Args:
        spec: The job's specification.
        other: Hardware in the place of the job's, or its name.

    Raises:
        InvalidConfigError: If the other hardware is not known.
    """
    own = spec.workers.hardware or (PROCESSOR if spec.workers.device_resource == RESOURCE_DEVICE else DEFAULT)
    named = other if isinstance(other, Hardware) else hardware_named(own if other is None else other)
    hardware = named.at(precision_of(spec.training, named.name), tf32=spec.training.tf32)
    limit = memory_limit(spec.workers.template) if named.name == PROCESSOR else None
    if limit is None:
        return hardware
    return dataclasses.replace(hardware, memory_bytes=limit // spec.workers.devices)


def numerics_of(spec: TrainingJobSpec, shape: ModelShape, *, hardware: str | None = None) -> Numerics:
    """Return the bytes of the numbers that a job's ranks hold; state in host memory takes none of the device's.

    Args:
        spec: The job's specification.
        shape: Its model.
        hardware: Name of other hardware than the job's.
    """
    training, name = spec.training, hardware or hardware_of(spec).name
    precision = precision_of(training, name)
    working = 4 if precision == "float32" else 2
    away = training.optimizer.state_memory == "Host" and name != PROCESSOR
    return Numerics(
        weight_bytes=working,
        optimizer_bytes=0 if away else state_bytes(precision),
        matrix_optimizer_bytes=0 if away else matrix_state_bytes(training, precision),
        activation_bytes=working,
        sharded_optimizer=divides_update(training, shape, precision),
        sharded_parameters=training.parameter_sharding == "FSDP2",
        weight_copies=2 if training.holds_reference else 1,
    )


def recomputes_of(spec: TrainingJobSpec) -> tuple[Recompute, ...]:
    """Return what a job's layers may recompute, the least first: what it names, or anything."""
    named = spec.training.recompute
    return tuple(Recompute) if named == "Auto" else (Recompute(named.lower()),)


def memory_limit(template: Mapping[str, Any]) -> int | None:
    """Read the memory limit of a pod template's first container [bytes]; None if it has none that can be read."""
    containers = (template.get("spec") or {}).get("containers") or [{}]
    limit = str(((containers[0].get("resources") or {}).get("limits") or {}).get("memory", ""))
    unit = next((unit for unit in _UNITS if limit.endswith(unit)), "")
    digits = limit.removesuffix(unit)
    return int(digits) * _UNITS.get(unit, 1) or None if digits.isdecimal() else None
