"""Cut of a step into pipeline stages and microbatches: schedule, layers of each stage, microbatches that fit."""

from __future__ import annotations

import dataclasses
import itertools

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.flops import Mix, forward_flops
from polyreme_planner.hardware import FLOAT32, Numerics
from polyreme_planner.layout import Layout
from polyreme_planner.model_parts import Part, layer_parts
from polyreme_planner.pipeline_simulation import StageTimes
from polyreme_planner.schedules import Schedule, chunks_of, ranks_of_stages, schedule_misfits, stages_per_rank
from polyreme_planner.shapes import ModelShape
from polyreme_planner.stage_split import ModelTimes, balanced_split, check_layers
from polyreme_planner.traffic_volume import GroupVolume

DEFAULT_SCHEDULE = Schedule.ONE_F_ONE_B
"""Schedule if a job names none."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Cut:
    """A step cut for one layout."""

    schedule: Schedule | None = None
    """None without stages."""
    stage_layers: tuple[int, ...] = ()
    """Decoder layers of each stage, in the order of the stages; empty without stages."""
    microbatches: int = 1
    """Microbatches of a data-parallel rank in a step, each of whole packs and equally many."""

    def __str__(self) -> str:
        """Name it in one line, ``4 microbatches, 1F1B, layers 6 7 7 7``."""
        count = f"{self.microbatches} microbatch{'es' if self.microbatches > 1 else ''}"
        stages = "" if self.schedule is None else f", {self.schedule}, layers {' '.join(map(str, self.stage_layers))}"
        return count + stages


WHOLE = Cut()
"""One stage, one microbatch."""


def cut_step(
    shape: ModelShape,
    *,
    pp: int,
    packs_per_rank: int,
    pack_tokens: int,
    schedule: Schedule | None = None,
    microbatches: int | None = None,
    stage_layers: tuple[int, ...] = (),
) -> Cut:
    """Choose what is not given, and refuse what does not fit.

    Args:
        shape: Sizes of the model.
        pp: Ranks of the pipeline.
        packs_per_rank: Packs of a data-parallel rank in a step.
        pack_tokens: Tokens of a pack.
        schedule: Order of work; the default is 1F1B.
        microbatches: Of a data-parallel rank; the default is as many as fit, up to one per pack, and 1 without stages.
        stage_layers: Of each stage; the default splits them by operations.

    Raises:
        InvalidConfigError: If the model has too few layers, other layers than are given, or no such number of
            microbatches fits.
    """
    if pp == 1:
        return Cut(microbatches=_checked(None, 1, packs_per_rank, microbatches or 1))
    schedule = schedule or DEFAULT_SCHEDULE
    stages = pp * stages_per_rank(schedule, _chunks_asked(schedule, pp, stage_layers))
    check_layers(shape.decoder.layers, stages)
    fitting = fitting_microbatches(schedule, pp=pp, packs_per_rank=packs_per_rank)
    if microbatches is None and not fitting:
        least = next(
            count for count in range(1, 2 * pp + 1) if not schedule_misfits(schedule, ranks=pp, microbatches=count)
        )
        raise InvalidConfigError(
            f"no number of microbatches fits: schedule {schedule} over pp {pp} needs at least {least} of whole packs, "
            f"a data-parallel rank has {packs_per_rank} packs per step",
            field="spec.training.packsPerStep",
        )
    return Cut(
        schedule=schedule,
        stage_layers=_checked_layers(shape, stage_layers, stages=stages)
        or default_layers(shape, schedule=schedule, pp=pp, pack_tokens=pack_tokens),
        microbatches=fitting[-1] if microbatches is None else _checked(schedule, pp, packs_per_rank, microbatches),
    )


def fitting_microbatches(schedule: Schedule | None, *, pp: int, packs_per_rank: int) -> list[int]:
    """List the numbers of microbatches that divide the packs and that the schedule can run, rising."""
    return [
        count
        for count in range(1, packs_per_rank + 1)
        if packs_per_rank % count == 0
        and (schedule is None or not schedule_misfits(schedule, ranks=pp, microbatches=count))
    ]


def accumulated_microbatches(schedule: Schedule | None, *, pp: int, packs_per_rank: int, packs: int) -> int | None:
    """Return in how many microbatches a resized rank runs its packs, so that none has more packs than before.

    A step keeps its packs at every size of a gang, and so its tokens: fewer ranks accumulate over more microbatches, in
    the memory that one always took.

    Args:
        schedule: Order of work; None without stages.
        pp: Ranks of the pipeline.
        packs_per_rank: Packs of a data-parallel rank in a step, at the new size.
        packs: Packs of a microbatch, at the size that the job was written for.

    Returns:
        The fewest that fit, the most if none is enough, None if the schedule can run none.
    """
    fitting = fitting_microbatches(schedule, pp=pp, packs_per_rank=packs_per_rank)
    enough = [count for count in fitting if packs_per_rank <= count * packs]
    return min(enough, default=fitting[-1] if fitting else None)


def default_layers(shape: ModelShape, *, schedule: Schedule, pp: int, pack_tokens: int) -> tuple[int, ...]:
    """Split the layers so that ranks have equal work by operations, tower and head priced; nothing is measured.

    Raises:
        InvalidConfigError: If there are more stages than layers can fill.
    """
    flops = forward_flops(shape, Mix(sequence_tokens=pack_tokens))

    def times(part: Part) -> StageTimes:
        return StageTimes(forward_s=flops[part], input_s=flops[part], weight_s=flops[part])

    model = ModelTimes(
        first=times(Part.TOWER), layers=tuple(times(part) for part in layer_parts(shape)), last=times(Part.HEAD)
    )
    return balanced_split(model, schedule=schedule, ranks=pp)


def stream_volumes(
    cut: Cut, *, layout: Layout, shape: ModelShape, tokens_per_rank: int, numerics: Numerics = FLOAT32
) -> tuple[GroupVolume, ...]:
    """Compute what the ranks of a pipeline send each other in a step: a stream forward, its gradient back.

    Context and tensor ranks each send the rows that they hold.
    """
    if cut.schedule is None:
        return ()
    pp = layout.pp
    rank_of = ranks_of_stages(cut.schedule, pp, chunks_of(cut.schedule, pp, len(cut.stage_layers)))
    crossings = sum(before != after for before, after in itertools.pairwise(rank_of))
    rows = tokens_per_rank // (layout.cp * layout.tp)
    stream_bytes = rows * shape.decoder.width * numerics.activation_bytes
    return (
        GroupVolume(
            axis="pp",
            ranks=pp,
            bytes_per_rank=2 * crossings * stream_bytes // pp,
            messages=-(-2 * crossings * cut.microbatches // pp),
        ),
    )


def _chunks_asked(schedule: Schedule, pp: int, stage_layers: tuple[int, ...]) -> int | None:
    """Return how many stages of a rank a job's layers imply: for an interleaved order any equal number above 1."""
    chunks = chunks_of(schedule, pp, len(stage_layers))
    return chunks if chunks is not None and chunks > 1 and len(stage_layers) == chunks * pp else None


def _checked_layers(shape: ModelShape, asked: tuple[int, ...], *, stages: int) -> tuple[int, ...]:
    """Refuse layers of stages that do not add up to the model's; none given is always right."""
    layers = shape.decoder.layers
    if not asked or (len(asked) == stages and sum(asked) == layers and 0 not in asked[1:-1]):
        return asked
    raise InvalidConfigError(
        f"layers of stages do not fit: {' '.join(map(str, asked))} are {sum(asked)} layers on {len(asked)} stages, the "
        f"model has {layers} and the schedule {stages}; each stage between the first and the last needs at least one "
        "layer",
        field="spec.parallelism.stageLayers",
    )


def _checked(schedule: Schedule | None, pp: int, packs_per_rank: int, asked: int) -> int:
    broken = [] if schedule is None else schedule_misfits(schedule, ranks=pp, microbatches=asked)
    if packs_per_rank % asked:
        broken.append(f"{asked} microbatches do not divide the {packs_per_rank} packs of a data-parallel rank")
    if not broken:
        return asked
    fitting = sorted(
        fitting_microbatches(schedule, pp=pp, packs_per_rank=packs_per_rank),
        key=lambda count: (abs(count - asked), count),
    )
    near = ", ".join(map(str, fitting[:3])) or "none, so raise spec.training.packsPerStep"
    raise InvalidConfigError(
        f"microbatches do not fit: {'; '.join(broken)}; numbers that fit: {near}",
        field="spec.parallelism.microbatches",
    )
