"""The number of steps that epochs take: counted by a walk through the windows of the order.

After so many steps every sample that fits the packs has been visited at least as often as there are epochs, of every
source that has a weight in some step; one step less would leave a visit out.
"""

from __future__ import annotations

from collections.abc import Sequence

from polyreme_datahub.errors import SourceInvalidError
from polyreme_datahub.loader.order.order import Order
from polyreme_datahub.loader.order.plan import OrderPlan

VISITS_COUNTED_MAX = 50_000_000
"""Visits of samples in a run whose steps are counted: some minutes."""
FIELD = "spec.training.epochs"


def steps_of_epochs(plan: OrderPlan, epochs: int) -> int:
    """Return the smallest number of steps after which every sample has been visited so often.

    Samples that a change of the mixture passes over count as visited, as everywhere.

    Args:
        plan: The order; its weights are those of ``weighing.weighed``, and no source has a limit of epochs.
        epochs: Visits of each sample.

    Raises:
        SourceInvalidError: If a source loses its weight before, or the data are too large to count.
    """
    needed = _turns_needed(plan, epochs)
    order = Order(plan)
    before: Sequence[int] = [0] * len(needed)
    for steps, turns in order.windows():
        if all(turn >= need for turn, need in zip(turns, needed, strict=True)):
            waiting = {at for at, need in enumerate(needed) if before[at] < need}
            return max(
                (
                    step
                    for step in steps
                    for slots in order.packs(step)
                    for slot in slots
                    if slot.source in waiting and slot.epoch < epochs
                ),
                default=steps.stop - 1,
            )
        _check_weights(plan, steps, turns, needed, epochs)
        before = turns
    raise AssertionError("an order has no end")


def _turns_needed(plan: OrderPlan, epochs: int) -> list[int]:
    """Return the turns of each source that it needs; 0 for one that never has a weight."""
    weighed = [any(segment.weights[at] for segment in plan.segments) for at in range(len(plan.names))]
    sizes = [int(lengths.size) for lengths in plan.fitting_lengths(plan.pack_tokens)]
    needed = [epochs * size if of else 0 for size, of in zip(sizes, weighed, strict=True)]
    # The rarest source decides: by then, the others have had turns by their weights.
    last = plan.segments[-1].weights
    times = max((need / weight for need, weight in zip(needed, last, strict=True) if weight), default=0.0)
    visits = max(sum(needed), int(times * sum(last)))
    if visits > VISITS_COUNTED_MAX:
        raise SourceInvalidError(
            f"{epochs} epochs are about {visits:,} visits of samples, and at most {VISITS_COUNTED_MAX:,} are counted; "
            "give training.steps instead",
            field=FIELD,
        )
    return needed


def _check_weights(plan: OrderPlan, steps: range, turns: Sequence[int], needed: Sequence[int], epochs: int) -> None:
    """Refuse to wait for a source that has no weight any more."""
    last = plan.segments[-1]
    if steps.start < last.first_step:
        return
    for at, name in enumerate(plan.names):
        if turns[at] < needed[at] and not last.weights[at]:
            raise SourceInvalidError(
                f"source {name!r} has weight 0 from step {last.first_step} on, before its samples were visited "
                f"{epochs} times; keep its weight, or give training.steps instead",
                field=FIELD,
            )
