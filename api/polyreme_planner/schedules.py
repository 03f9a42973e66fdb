"""Schedules of a pipeline: the work of each rank, one piece after another, as tables.

A stage's forward (F) of a microbatch needs the stage before; its backward (B) needs the stage after. Zero-bubble orders
split B into the gradient of the inputs (I), which the stage before waits for, and that of the weights (W), which no
stage waits for. The tables are those that torch.distributed.pipelining runs; a test of the trainer compares them.

Sources: 1F1B and interleaved, arXiv:2104.04473, section 2.2; ZBV, arXiv:2401.10241, section 6; DualPipeV, the V-shaped
half of DualPipe, arXiv:2412.19437, section 3.2.1.
"""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

from polyreme_api.errors import InvalidConfigError


class Schedule(enum.StrEnum):
    """Schedules by torch's names."""

    ONE_F_ONE_B = "1F1B"
    INTERLEAVED = "Interleaved1F1B"
    ZBV = "ZBVZeroBubble"
    DUAL_PIPE_V = "DualPipeV"


V_SHAPED = frozenset({Schedule.ZBV, Schedule.DUAL_PIPE_V})
"""Schedules in which a rank holds a stage and its mirror image: the first and the last stage meet on rank 0."""


class Kind(enum.StrEnum):
    """Kinds of work."""

    FORWARD = "F"
    BACKWARD = "B"
    """Both gradients at once."""
    INPUT = "I"
    WEIGHT = "W"


class Work(NamedTuple):
    """One piece of work."""

    kind: Kind
    stage: int
    microbatch: int

    def __str__(self) -> str:
        """Write it as ``3F7``: stage, kind, microbatch."""
        return f"{self.stage}{self.kind}{self.microbatch}"


Slot = tuple[Work, ...]
"""Pieces that begin and end together: one, or a forward and a backward that overlap."""
Table = tuple[tuple[Slot, ...], ...]
"""Slots of each rank, in order."""


def stages_per_rank(schedule: Schedule, chunks: int | None = None) -> int:
    """Stages that a rank holds: two if the schedule has several; an interleaved one may have more.

    Args:
        schedule: Order of work.
        chunks: Stages of a rank if the schedule is interleaved; None for two.
    """
    if schedule is Schedule.INTERLEAVED:
        return chunks or 2
    return 1 if schedule is Schedule.ONE_F_ONE_B else 2


def chunks_of(schedule: Schedule | None, ranks: int, stages: int) -> int | None:
    """Return the stages of a rank if the schedule is interleaved, from the number of all; else None."""
    return stages // ranks if schedule is Schedule.INTERLEAVED and stages else None


def ranks_of_stages(schedule: Schedule, ranks: int, chunks: int | None = None) -> tuple[int, ...]:
    """Return the rank of each stage."""
    stages = ranks * stages_per_rank(schedule, chunks)
    if schedule in V_SHAPED:
        return tuple(min(stage, stages - 1 - stage) for stage in range(stages))
    return tuple(stage % ranks for stage in range(stages))


def schedule_misfits(schedule: Schedule, *, ranks: int, microbatches: int) -> list[str]:
    """Return, in words, why a schedule can't run; empty if it can."""
    rules = [(ranks > 1, f"schedule {schedule} needs pp of at least 2, it is {ranks}")]
    if schedule is Schedule.INTERLEAVED:
        rounds = max(1, microbatches // ranks)
        words = f"{microbatches} microbatches do not form equal rounds over pp {ranks}"
        rules += [(microbatches >= ranks and microbatches % rounds == 0, f"schedule {schedule}: {words}")]
    if schedule is Schedule.ONE_F_ONE_B:
        rules += [
            (microbatches >= ranks, f"schedule {schedule}: {microbatches} microbatches, expected at least pp {ranks}")
        ]
    if schedule in V_SHAPED:
        few = f"schedule {schedule}: {microbatches} microbatches, expected at least its {2 * ranks} stages"
        rules += [(microbatches >= 2 * ranks, few)]
    return [words for holds, words in rules if not holds]


@functools.lru_cache(maxsize=256)
def table(schedule: Schedule, *, ranks: int, microbatches: int, chunks: int | None = None) -> Table:
    """Lay out the order of every rank.

    Raises:
        InvalidConfigError: If the schedule can't run so many microbatches over so many ranks.
    """
    if broken := schedule_misfits(schedule, ranks=ranks, microbatches=microbatches):
        raise InvalidConfigError(f"schedule does not fit: {'; '.join(broken)}", field="spec.parallelism")
    if schedule is Schedule.INTERLEAVED:
        each = stages_per_rank(schedule, chunks)
        return tuple(tuple(_interleaved(rank, ranks, microbatches, chunks=each)) for rank in range(ranks))
    lay = _LAYING[schedule]
    return tuple(tuple(lay(rank, ranks, microbatches)) for rank in range(ranks))


class _Rank:
    """Hands out the next microbatch of each kind of work on each stage."""

    def __init__(self) -> None:
        self._next: collections.Counter[tuple[Kind, int]] = collections.Counter()

    def take(self, kind: Kind, stage: int) -> Work:
        """Name the next piece; a whole backward counts as both of its halves."""
        counted = Kind.INPUT if kind is Kind.BACKWARD else kind
        microbatch = self._next[counted, stage]
        self._next[counted, stage] += 1
        if kind is Kind.BACKWARD:
            self._next[Kind.WEIGHT, stage] += 1
        return Work(kind, stage, microbatch)


def _interleaved(rank: int, ranks: int, microbatches: int, *, chunks: int) -> Iterator[Slot]:
    """Run ahead by as many forwards as the first backward takes to come back, then alternate."""
    in_cycle = microbatches // max(1, microbatches // ranks)
    pieces = microbatches * chunks
    chunk_of = [at // in_cycle % chunks for at in range(pieces)]
    ahead = min((chunks - 1) * in_cycle + 2 * (ranks - 1 - rank), pieces)
    if chunks == 1:
        ahead = min(ranks - 1 - rank, pieces)
    work = _Rank()
    for at in range(pieces + ahead):
        if at < pieces:
            yield (work.take(Kind.FORWARD, chunk_of[at] * ranks + rank),)
        if at >= ahead:
            yield (work.take(Kind.BACKWARD, (chunks - 1 - chunk_of[at - ahead]) * ranks + rank),)


def _one_f_one_b(rank: int, ranks: int, microbatches: int) -> Iterator[Slot]:
    return _interleaved(rank, ranks, microbatches, chunks=1)


def _zbv(rank: int, ranks: int, microbatches: int) -> Iterator[Slot]:
    """Down the V and up again; weight gradients directly after those of inputs, and last where they fill the end."""
    down, up = rank, 2 * ranks - 1 - rank
    f, i, w = Kind.FORWARD, Kind.INPUT, Kind.WEIGHT
    ahead = 2 * (ranks - rank) - 1
    begin = [(f, down)] * ahead + [(f, up), (f, down)] * rank + [(f, up), (i, up), (w, up)] * (ranks - rank)
    begun_down, begun_up = ahead + rank, ranks
    steady: list[tuple[Kind, int]] = []
    while begun_up < begun_down or begun_down < microbatches:
        if begun_down < microbatches:
            steady.append((f, down))
            begun_down += 1
        steady += [(i, down), (w, down), (f, up), (i, up), (w, up)]
        begun_up += 1
    end = [(i, down), (i, up)] * rank + [(i, down), (w, down)] * (ranks - rank) + [(w, up)] * rank + [(w, down)] * rank
    work = _Rank()
    return ((work.take(kind, stage),) for kind, stage in (*begin, *steady, *end))


_OLDEST = -1
"""Marker for the stage whose weight gradient has been pending longest."""


def _dual_pipe_v(rank: int, ranks: int, microbatches: int) -> Iterator[Slot]:
    """Down the V and up again; between begin and end a forward and a backward of the two stages always overlap."""
    down, up = rank, 2 * ranks - 1 - rank
    later_ranks = ranks - 1 - rank
    f, b, i, w = Kind.FORWARD, Kind.BACKWARD, Kind.INPUT, Kind.WEIGHT
    owed_weight = [(w, _OLDEST)]
    begin = [[(f, down)]] * 2 * later_ranks + [[(f, down)], [(f, up)]] * (rank + 1)
    begin += [[(i, up)], owed_weight, [(f, up)]] * later_ranks
    steady = [[(f, down), (b, up)], [(f, up), (b, down)]] * (microbatches - 2 * ranks + rank + 1)
    if later_ranks == 0:
        steady[:1] = [[(f, down)], [(b, up)]]  # apart, the bubble at the turn is smaller
    end = [[(b, up)], [(f, up), (b, down)]] * later_ranks
    whole = (rank + 1) // 2 * 2 + (1 - rank % 2)
    end += [[(b if at < whole else i, down if at % 2 else up)] for at in range(2 * (rank + 1))]
    end += [owed_weight, [(i, down)]] * later_ranks + [owed_weight] * (rank + 1)
    work = _Rank()
    owed: collections.deque[int] = collections.deque()
    for slot in (*begin, *steady, *end):
        owed.extend(stage for kind, stage in slot if kind is i)
        yield tuple(work.take(kind, owed.popleft() if stage == _OLDEST else stage) for kind, stage in slot)


_LAYING: Mapping[Schedule, Callable[[int, int, int], Iterator[Slot]]] = {
    Schedule.ONE_F_ONE_B: _one_f_one_b,
    Schedule.ZBV: _zbv,
    Schedule.DUAL_PIPE_V: _dual_pipe_v,
}


def pieces(slots: Iterable[Slot]) -> Iterator[Work]:
    """Walk through the work of a rank in order."""
    for slot in slots:
        yield from slot
