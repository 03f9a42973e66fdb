"""Messages for plans that do not fit the memory: the largest consumers, what would fit, and the field to change."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.automatic import HOLDING_ALL, nearest
from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.hardware import GIB
from polyreme_planner.layout import Layout, packs_of_rank
from polyreme_planner.memory import Memory, memory_of, size_words
from polyreme_planner.pipelines import Cut
from polyreme_planner.search import Estimate, is_compatible, most_simulated_microbatches

LARGER_MAX = 16
"""Times as many workers among which a refusal looks for the plan that would fit."""
CHECKS_KEPT = 4096
RECOMPUTE_FIELD = "spec.training.recompute"


def what_does_not_fit(
    setting: Setting,
    leanest: Estimate | None,
    *,
    replicas: int,
    devices: int,
    packs_per_step: int,
    found: Callable[[int], Estimate | None],
    with_recompute: Callable[[], Estimate | None] | None = None,
) -> InvalidConfigError:
    """Word the refusal of a job that nothing fits: the largest consumers, and the plan that would fit.

    Args:
        setting: Model, mix, hardware and numerics.
        leanest: The plan that needs least memory of all that was searched; None if nothing could be searched.
        replicas: Worker pods.
        devices: Devices of each.
        packs_per_step: Of all ranks together.
        found: Searches the best plan of so many ranks.
        with_recompute: Searches the best plan of these ranks with recomputation that was not searched yet.
    """
    world = replicas * devices
    if leanest is None:
        return InvalidConfigError(
            f"no plan for {world} ranks: no degrees that share {packs_per_step} packs per step and divide the model's "
            "sizes can be trained",
            field="spec.workers.replicas or spec.training.packsPerStep",
        )
    if with_recompute is not None and (other := with_recompute()) is not None:
        named = f"{RECOMPUTE_FIELD}: {other.candidate.recompute.title()}"
        return InvalidConfigError(
            f"{_too_large(setting, leanest, world)}; with {named} it would fit: {other.candidate}",
            field=f"{named} or spec.workers.replicas",
        )
    words = f"no plan of up to {LARGER_MAX} times as many workers fits either"
    for times in itertools.takewhile(lambda factor: factor <= LARGER_MAX, (2**power for power in itertools.count(1))):
        if (larger := found(world * times)) is not None:
            words = f"{replicas * times} workers would fit: {larger.candidate}"
            break
    return InvalidConfigError(
        f"{_too_large(setting, leanest, world)}; {words}",
        field="spec.workers.replicas or spec.workers.hardware",
    )


def _too_large(setting: Setting, leanest: Estimate, world: int) -> str:
    return (
        f"model does not fit {world} x {setting.hardware.name}: the plan with the least memory, {leanest.candidate}, "
        f"{_needs(setting, leanest.memory)}"
    )


def memory_of_cut(
    setting: Setting, layout: Layout, cut: Cut, *, packs_per_step: int, recompute: Recompute = Recompute.NONE
) -> Memory:
    """Compute the fullest rank of a layout with a step cut as it is."""
    return memory_of(
        setting,
        layout,
        packs=packs_of_rank(packs_per_step, layout.dp) // cut.microbatches,
        microbatches=min(cut.microbatches, most_simulated_microbatches(layout)),
        recompute=recompute,
        schedule=cut.schedule,
        split=cut.stage_layers or (setting.shape.decoder.layers,),
    )


def check_memory(
    setting: Setting,
    layout: Layout,
    cut: Cut,
    *,
    packs_per_step: int,
    recomputes: tuple[Recompute, ...] = HOLDING_ALL,
) -> tuple[Recompute, ...]:
    """Refuse a layout that does not fit the memory, whatever its layers recompute of what they may.

    Args:
        setting: Model, mix, hardware and numerics.
        layout: Degrees.
        cut: Of its step.
        packs_per_step: Of all ranks together.
        recomputes: What layers may recompute, the least first.

    Returns:
        Those of them with which it fits, in the same order.

    Raises:
        InvalidConfigError: Naming the largest consumers, what else layers could recompute, and the layout most like it
            that fits.
    """
    fitting, words, field = _fitting(setting, layout, cut, packs_per_step, recomputes)
    if not fitting:
        raise InvalidConfigError(words, field=field)
    return fitting


@functools.lru_cache(maxsize=CHECKS_KEPT)
def _fitting(
    setting: Setting, layout: Layout, cut: Cut, packs_per_step: int, recomputes: tuple[Recompute, ...]
) -> tuple[tuple[Recompute, ...], str, str]:
    """Return the choices with which a layout fits the memory; if there are none, the sentence why, and the fields."""
    needed = {
        recompute: memory_of_cut(setting, layout, cut, packs_per_step=packs_per_step, recompute=recompute)
        for recompute in Recompute
    }
    usable = setting.hardware.usable_bytes
    fits = [recompute for recompute, memory in needed.items() if memory.total_bytes <= usable]
    trained = [recompute for recompute in Recompute if is_compatible(recompute, cut.schedule)]
    if found := tuple(recompute for recompute in recomputes if recompute in fits and recompute in trained):
        return found, "", ""
    tried = [recompute for recompute in recomputes if recompute in trained] or list(recomputes)
    leanest = min(tried, key=lambda recompute: needed[recompute].total_bytes)
    again = "" if leanest is Recompute.NONE else f", recompute {leanest},"
    parts = [f"layout does not fit {setting.hardware.name}: {layout}{again} {_needs(setting, needed[leanest])}"]
    field = "spec.parallelism"
    if other := next((recompute for recompute in fits if recompute in trained), None):
        parts.append(f"with {RECOMPUTE_FIELD}: {other.title()} it would fit, {size_words(needed[other].total_bytes)}")
        field = f"{RECOMPUTE_FIELD} or {field}"
    elif fits:
        parts.append(
            f"recompute {fits[0]} would make it fit, but cannot be combined with schedule {cut.schedule}, which "
            "computes gradients of inputs and of weights separately"
        )
    near = nearest(setting, layout, packs_per_step=packs_per_step, recomputes=recomputes)
    if near is None:
        parts.append(f"no layout of {layout.world} ranks fits; raise spec.workers.replicas")
    else:
        parts.append(f"the nearest that fits: {near.candidate}, {size_words(near.memory.total_bytes)}")
    return (), "; ".join(parts), field


def out_of_memory(
    setting: Setting,
    layout: Layout,
    cut: Cut,
    *,
    packs_per_step: int,
    message: str,
    recompute: Recompute = Recompute.NONE,
) -> str:
    """Word the error of a rank that ran out of memory: its largest consumers by arithmetic, and what would fit.

    Args:
        setting: Model, mix, hardware and numerics.
        layout: Of the rank's attempt.
        cut: Of its step.
        packs_per_step: Of all ranks together.
        message: The allocator's message.
        recompute: What layers recompute.
    """
    memory = memory_of_cut(setting, layout, cut, packs_per_step=packs_per_step, recompute=recompute)
    usable = min(setting.hardware.usable_bytes, int(0.9 * memory.total_bytes))
    hardware = dataclasses.replace(setting.hardware, memory_bytes=usable, usable_share=1.0)
    reduced = dataclasses.replace(setting, hardware=hardware)
    near = nearest(reduced, layout, packs_per_step=packs_per_step, recomputes=tuple(Recompute))
    words = f"no layout of {layout.world} ranks needs less; raise spec.workers.replicas"
    if near is not None:
        words = f"a layout that needs less: {near.candidate}, {size_words(near.memory.total_bytes)}"
    return (
        f"rank ran out of memory: {message}; the plan, {layout}, counts {size_words(memory.total_bytes)} per device: "
        f"{memory.largest()}; {words}"
    )


def _needs(setting: Setting, memory: Memory) -> str:
    total, usable = memory.total_bytes / GIB, setting.hardware.usable_bytes / GIB
    return f"needs {total:.1f} GiB per device of {usable:.1f} usable: {memory.largest()}"
