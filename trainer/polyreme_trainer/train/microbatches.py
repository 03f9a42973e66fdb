"""A step's packs as one rank trains on them: cut into microbatches, images dealt out, on the device of the model."""

from __future__ import annotations

from polyreme_api.batch import BatchSource
from polyreme_api.errors import InvalidConfigError
from polyreme_trainer.parallel.mesh import Meshes, packs_of
from polyreme_trainer.train.inputs import Inputs, to_inputs
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState


def read_microbatches(
    state: TrainState, source: BatchSource, settings: TrainSettings, meshes: Meshes, number: int
) -> list[Inputs]:
    """Read this rank's packs of a step, a microbatch at a time: each of whole packs, and equally many.

    Raises:
        InvalidConfigError: If packs, microbatches and ranks do not fit, or images their media tokens.
    """
    packs = source.packs_in(number)
    mine = packs_of(settings.layout, meshes.rank, packs)
    count = settings.pipeline.microbatches
    if len(mine) % count:
        raise InvalidConfigError(
            f"microbatches do not fit: {count} do not divide the {len(mine)} packs of a data-parallel rank",
            field="spec.parallelism.microbatches",
        )
    share, device = len(mine) // count, settings.rank.device_type
    firsts = [[dp + place for dp in range(0, packs, len(mine))] for place in range(0, len(mine), share)]
    dealt = (
        [None] * count
        if state.dealing is None
        else state.dealing.deal(
            source, number, [[range(first, first + share) for first in by_rank] for by_rank in firsts]
        )
    )
    return [
        to_inputs(source.packs(number, first=first, count=share), device=device, sharing=state.sharing, dealt=one)
        for first, one in zip(mine[::share], dealt, strict=True)
    ]
