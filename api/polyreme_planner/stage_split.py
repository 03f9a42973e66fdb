"""Split of the decoder layers over the stages of a pipeline, by their cost, with tower and head priced.

The tower and the embedding are on the first stage and the head on the last, so a split is one number of layers per
stage. Stages may differ in size: of two stages that one rank holds (V-shaped or interleaved), the sum and the parts
matter. A split is good if its schedule, simulated with its times, ends early; small problems are searched completely,
larger ones by hill climbing from several starts, with a bounded number of simulations.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterator, Sequence

from polyreme_api.errors import InvalidConfigError
from polyreme_planner.pipeline_simulation import StageTimes, program
from polyreme_planner.schedules import Schedule, ranks_of_stages

SIMULATIONS_MAX = 4000
"""Most simulations of the schedule for one split."""
WHOLE_MAX = 400
"""Number of splits up to which all of them are tried."""
KICKS_MAX = 4000
"""Pairs of changes that are examined."""
MOVED_MAX = 3
"""Layers that one change may move at once."""
NOTHING = StageTimes(forward_s=0.0, input_s=0.0, weight_s=0.0)

Split = tuple[int, ...]
"""Decoder layers of each stage."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ModelTimes:
    """Time of each part of the model, for one microbatch."""

    first: StageTimes
    """Tower and embedding."""
    layers: tuple[StageTimes, ...]
    last: StageTimes
    """Last norm, head and loss."""

    def of_stages(self, split: Split) -> list[StageTimes]:
        """Sum the parts of each stage."""
        ends = list(itertools.accumulate(split, initial=0))
        stages = [plus(*self.layers[begin:end]) for begin, end in itertools.pairwise(ends)]
        stages[0] = plus(self.first, stages[0])
        stages[-1] = plus(stages[-1], self.last)
        return stages


def plus(*parts: StageTimes) -> StageTimes:
    """Add times up."""
    return StageTimes(
        forward_s=math.fsum(part.forward_s for part in parts),
        input_s=math.fsum(part.input_s for part in parts),
        weight_s=math.fsum(part.weight_s for part in parts),
    )


def least_layers(stages: int) -> Split:
    """Fewest layers of each stage: the first has the embedding and the last the head, so these may have none."""
    return tuple(int(0 < stage < stages - 1) for stage in range(stages))


def check_layers(layers: int, stages: int) -> None:
    """Refuse more stages than the layers can fill.

    Raises:
        InvalidConfigError: If there are too few layers.
    """
    if layers < sum(least_layers(stages)):
        raise InvalidConfigError(
            f"pipeline has too many stages: {stages} for {layers} layers, expected at least one layer on each between "
            "the first and the last",
            field="spec.parallelism.pp",
        )


def equal_split(layers: int, stages: int) -> Split:
    """Give every stage the same number of layers; if that does not come out even, the first ones get one more."""
    each, more = divmod(layers, stages)
    return tuple(each + (stage < more) for stage in range(stages))


def balanced_split(times: ModelTimes, *, schedule: Schedule, ranks: int, chunks: int | None = None) -> Split:
    """Split the layers so that no rank has much more work than another; no schedule is simulated.

    Exact if all layers cost the same: each layer goes to the rank that is done first, and there to the stage with the
    least work.

    Raises:
        InvalidConfigError: If there are more stages than layers can fill.
    """
    rank_of = ranks_of_stages(schedule, ranks, chunks)
    stages = len(rank_of)
    check_layers(len(times.layers), stages)
    layer_s = math.fsum(layer.total_s for layer in times.layers) / len(times.layers)
    counts = list(least_layers(stages))
    load_s = [layer_s * count for count in counts]
    load_s[0] += times.first.total_s
    load_s[-1] += times.last.total_s
    of_rank_s = [math.fsum(load_s[stage] for stage in range(stages) if rank_of[stage] == rank) for rank in range(ranks)]
    for _ in range(len(times.layers) - sum(counts)):
        rank = min(range(ranks), key=of_rank_s.__getitem__)
        stage = min((stage for stage in range(stages) if rank_of[stage] == rank), key=load_s.__getitem__)
        counts[stage] += 1
        load_s[stage] += layer_s
        of_rank_s[rank] += layer_s
    return tuple(counts)


def best_split(
    times: ModelTimes,
    *,
    schedule: Schedule,
    ranks: int,
    microbatches: int,
    chunks: int | None = None,
    transfer_s: float = 0.0,
    simulations: int = SIMULATIONS_MAX,
    allowed: Callable[[Split], bool] | None = None,
) -> tuple[Split, float]:
    """Find the split whose schedule ends first.

    Args:
        times: Of the model's parts.
        schedule: Order of work.
        ranks: Of the pipeline.
        microbatches: Of a step.
        chunks: Stages of a rank if the schedule is interleaved.
        transfer_s: Between ranks.
        simulations: Most simulations of the schedule.
        allowed: Whether a split is allowed, for example by its memory; others are skipped.

    Returns:
        The split and its time [seconds]; an infinite time if no split that was tried is allowed.

    Raises:
        InvalidConfigError: If there are more stages than layers can fill, or the schedule does not fit.
    """
    layers, stages = len(times.layers), len(ranks_of_stages(schedule, ranks, chunks))
    check_layers(layers, stages)
    simulate = program(schedule, ranks=ranks, microbatches=microbatches, chunks=chunks).makespan_s
    known: dict[Split, float] = {}

    def took_s(split: Split) -> float:
        if split not in known:
            may = allowed is None or allowed(split)
            known[split] = simulate(times.of_stages(split), transfer_s=transfer_s) if may else math.inf
        return known[split]

    if _count(layers, stages) <= min(WHOLE_MAX, simulations):
        best = min(_every(layers, least_layers(stages)), key=took_s)
        return best, took_s(best)
    least = least_layers(stages)
    best = balanced_split(times, schedule=schedule, ranks=ranks, chunks=chunks)
    for start in (best, equal_split(layers, stages)):
        if _above(start, least):
            best = min(best, _climb(start, took_s, least, lambda: len(known) < simulations), key=took_s)
    for kicked in _kicks(best, least):  # out of the local optimum: no single change leads there
        if len(known) >= simulations:
            break
        best = min(best, _climb(kicked, took_s, least, lambda: len(known) < simulations), key=took_s)
    return best, took_s(best)


def _climb(start: Split, took_s: Callable[[Split], float], least: Split, go_on: Callable[[], bool]) -> Split:
    """Take the first change that helps, until none does or the simulations are used up."""
    best, helped = start, True
    while helped and go_on():
        helped = False
        for other in _neighbours(best, least):
            if not go_on():
                break
            if took_s(other) < took_s(best) * (1 - 1e-9):
                best, helped = other, True
                break
    return best


def _neighbours(split: Split, least: Split) -> Iterator[Split]:
    stages = range(len(split))
    for moved, (giver, taker) in itertools.product(range(1, MOVED_MAX + 1), itertools.permutations(stages, 2)):
        if split[giver] - moved >= least[giver]:
            yield _moved(split, giver, taker, moved)


def _kicks(split: Split, least: Split) -> Iterator[Split]:
    """Make two changes at once, on four stages."""
    spare = [count - low for count, low in zip(split, least, strict=True)]
    pairs = list(itertools.permutations(range(len(split)), 2))
    two = [pair for pair in pairs if spare[pair[0]] >= 2]
    one = [pair for pair in pairs if spare[pair[0]] >= 1]
    for (giver, taker), (other, its_taker) in itertools.islice(itertools.product(two, one), KICKS_MAX):
        if len({giver, taker, other, its_taker}) == 4:
            yield _moved(_moved(split, giver, taker, 2), other, its_taker, 1)


def _moved(split: Split, giver: int, taker: int, layers: int) -> Split:
    change = {giver: -layers, taker: layers}
    return tuple(count + change.get(stage, 0) for stage, count in enumerate(split))


def _above(split: Sequence[int], least: Split) -> bool:
    return all(count >= low for count, low in zip(split, least, strict=True))


def _count(layers: int, stages: int) -> int:
    return math.comb(layers - sum(least_layers(stages)) + stages - 1, stages - 1)


def _every(layers: int, least: Split) -> Iterator[Split]:
    spare = layers - sum(least)
    for bars in itertools.combinations(range(spare + len(least) - 1), len(least) - 1):
        ends = (-1, *bars, spare + len(least) - 1)
        given = (after - before - 1 for before, after in itertools.pairwise(ends))
        yield tuple(low + more for low, more in zip(least, given, strict=True))
