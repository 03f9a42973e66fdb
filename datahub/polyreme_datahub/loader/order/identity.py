"""Identity of a run's data and their order: which checkpoints of a loader belong to it.

It is a chain of digests. The first link covers the data and the changes of the mixture that were known from the
beginning; each appended change adds a link with its first step. The identity at a step is that of the links up to it,
so a later change alters the identity of no earlier step.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from polyreme_api.job.spec import TrainingJobSpec
from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.index.blocks import BLOCKS
from polyreme_datahub.index.format import BY_PILLOW, PIXELS
from polyreme_datahub.loader.order.plan import Identity, OrderPlan
from polyreme_datahub.loader.order.weighing import WEIGHING_VERSION
from polyreme_planner.mixture import WINDOW_PACKS, segments_of, weights_of


def identity_of_order(
    order: OrderPlan,
    spec: TrainingJobSpec,
    identities: Sequence[str],
    mixture: MixtureRecord | None,
    *,
    augmentation: Sequence[Any],
    pixel_version: int,
) -> Identity:
    """Return the identity of an order.

    Args:
        order: The order.
        spec: The job's specification.
        identities: Identity of each source's index.
        mixture: Changes of the mixture by which the order was made.
        augmentation: What describes how samples change at a visit; empty: they do not.
        pixel_version: How images become pixels.
    """
    known = None if mixture is None else mixture.model_copy(update={"changes": ()})
    first = dataclasses.replace(order, segments=segments_of(spec, known))
    facts: list[Any] = [
        order.names,
        list(identities),
        order.seed,
        [[segment.first_step, segment.weights] for segment in first.segments],
    ]
    facts += [order.packs_per_step, order.pack_tokens, order.version, WINDOW_PACKS]
    if any(segment.skip_steps for segment in first.segments):
        facts += [[segment.skip_steps for segment in first.segments]]
    if spec.data.weights_by != "Samples" or spec.data.temperature is not None:
        temperature = None if spec.data.temperature is None else str(Decimal(spec.data.temperature).normalize())
        facts += [WEIGHING_VERSION, spec.data.weights_by, temperature]
    if any(limits := [source.epochs_max for source in spec.data.sources]):
        facts += ["epochsMax", limits, order.last_step]
    if spec.data.start_while_processing:
        facts += [BLOCKS]
    packed = [[order.packs_in(segment), order.tokens_in(segment)] for segment in first.segments]
    if packed != [[order.packs_per_step, order.pack_tokens]] * len(packed):
        facts += packed
    if any(rooms := [segment.answer_room for segment in first.segments]):
        facts += ["answerRoom", rooms]
    facts += augmentation
    if pixel_version != BY_PILLOW:
        facts += [PIXELS, pixel_version]
    links = [(0, _digest(facts))]
    for change in () if mixture is None else mixture.changes:
        passed = [change.skip_steps] if change.skip_steps else []
        links.append((change.step, _digest([links[-1][1], change.step, weights_of(change, order.names), *passed])))
    return Identity(tuple(links), mixture)


def _digest(facts: Sequence[Any]) -> str:
    return hashlib.sha256(json.dumps(facts).encode()).hexdigest()
