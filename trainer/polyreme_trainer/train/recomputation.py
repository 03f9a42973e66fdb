"""Recomputation of a step that is a spike, to find a rank that computes wrongly: memory or a device that fails.

Each rank marks what it computed before anything was summed: its loss, and the squared norms of its gradients. The step
is then trained once more, on the data-parallel neighbour's packs and on its own. A rank whose own result is another one
the second time had a fault that passed; one that differs from its neighbours on the same packs still has it. The last
repetition is the result of the step, so a fault that passed is in no update.

Processors repeat a step bit by bit. Accelerators do not: there it is trained once more, and if it is no spike then,
the answer is "not reproduced", which names no rank.

Rows that FSDP2 shards are summed while the backward runs: of these gradients no rank has its own. Where data-parallel
ranks encode each other's images (``imagesOver: Data``), packs stay on their rank.
"""

from __future__ import annotations

import dataclasses
import math
import pickle
import socket
from collections.abc import Sequence

import torch
from torch import Tensor

from polyreme_planner.layout import Layout
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.gradients import LocalStep
from polyreme_trainer.parallel.mesh import Meshes
from polyreme_trainer.train.microbatches import ReadPacks, to_microbatches
from polyreme_trainer.train.online_reference import compared
from polyreme_trainer.train.settings import TrainSettings
from polyreme_trainer.train.state import TrainState, backward

SAME = 1e-3
"""Largest relative difference of results on two ranks: experts sum rows in another order there."""
NAMED_MAX = 8
"""Ranks that a finding names."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mark:
    """What a rank computed for its packs, before sums over ranks."""

    loss: float
    dense: float
    """Squared norm of the gradients of whole parameters, and of those that stay float32."""
    held: float
    """The same of this rank's slices and experts."""


@dataclasses.dataclass(frozen=True, slots=True)
class Marks:
    """All that a rank computed of a step."""

    first: Mark
    again: Mark
    of_neighbour: Mark | None
    """For the packs of the data-parallel rank before this one; None: not tried."""
    host: str


def mark_of(state: TrainState, local: LocalStep) -> Mark:
    """Mark a step between the backward pass and the sums over ranks."""
    dense, held = (
        sum(float(part.gradients.square().sum()) for part in parts)
        for parts in ((state.flat.dense, state.flat.exact), (state.flat.tensor.flat, state.flat.experts.flat))
    )
    return Mark(loss=float(local.loss_sum), dense=dense, held=held)


def recompute(
    state: TrainState,
    packs: Sequence[ReadPacks],
    settings: TrainSettings,
    meshes: Meshes,
    *,
    first: Mark,
    requested: LocalStep,
) -> tuple[LocalStep, str]:
    """Train a step's packs once more, on another rank and on this one; every rank calls it.

    The control group must be free.

    Args:
        state: Before the update.
        packs: Of this rank.
        settings: The run.
        meshes: Its place.
        first: What the rank computed the first time.
        requested: Of the first time, for what was asked of the rank.

    Returns:
        The last repetition, whose gradients are not summed yet, and what was found, as a sentence.
    """
    exact, of_neighbour = settings.rank.device_type == "cpu", None
    if exact and meshes.layout.dp > 1 and state.image_balancer is None:
        other = _from_neighbour(packs, meshes)
        of_neighbour = mark_of(state, _train(state, other, settings, meshes))
    local = _train(state, packs, settings, meshes)
    marks = Marks(first, mark_of(state, local), of_neighbour, socket.gethostname())
    gathered = collectives.gather_to_all(marks, meshes.control_group)
    local = dataclasses.replace(local, stop=requested.stop, save=requested.save, refresh=requested.refresh)
    return local, finding(gathered, meshes.layout) if exact else ""


def finding(marks_R: Sequence[Marks], layout: Layout) -> str:
    """Return what the results of all ranks show, as a sentence.

    Args:
        marks_R: Of each rank.
        layout: Degrees of the axes.
    """
    # By their texts: of the same bits, also where they are no numbers.
    changed = [rank for rank, marks in enumerate(marks_R) if repr(marks.first) != repr(marks.again)]
    if changed:
        return f"computed again, {_named(changed, marks_R)} had another result: a fault that passed"
    if any(marks.of_neighbour is None for marks in marks_R):
        return "computed again on the same ranks, the result is the same"
    odd = odd_ranks(marks_R, layout)
    if not odd:
        return "computed again on the same and on other ranks, the result is the same"
    if len(odd) == len(marks_R) and layout.dp > 2:
        return "computed again on other ranks, the result is another one, and no one rank explains it"
    return (
        f"computed again on other ranks, {_named(odd, marks_R)} had another result than its peers: a fault that lasts"
    )


def odd_ranks(marks_R: Sequence[Marks], layout: Layout) -> list[int]:
    """Return the ranks that differ from their neighbours on their own packs and on those of the rank before.

    Of two copies both do.
    """
    differs = set()
    for rank, marks in enumerate(marks_R):
        before = rank_before(rank, layout)
        if marks.of_neighbour is not None and not _close(marks.of_neighbour, marks_R[before].first):
            differs.add(before)  # its packs gave something else on ``rank``
    return [rank for rank in range(len(marks_R)) if {rank, rank_before(rank, layout)} <= differs]


def rank_before(rank: int, layout: Layout) -> int:
    """Return the data-parallel rank whose packs a rank gets."""
    stage, apart = layout.dp * layout.cp * layout.tp, layout.cp * layout.tp
    return rank // stage * stage + (rank - apart) % stage


def _train(state: TrainState, packs: Sequence[ReadPacks], settings: TrainSettings, meshes: Meshes) -> LocalStep:
    microbatches = compared(state, to_microbatches(state, packs, settings), meshes)
    return backward(state, *microbatches, whole=True)


def _from_neighbour(packs: Sequence[ReadPacks], meshes: Meshes) -> list[ReadPacks]:
    """Send the packs to the next data-parallel rank, and receive those of the one before."""
    layout, group = meshes.layout, meshes.stage_group
    sent = torch.frombuffer(bytearray(pickle.dumps(list(packs))), dtype=torch.uint8)
    length, other_length = torch.tensor([sent.numel()]), torch.empty(1, dtype=torch.int64)
    collectives.pass_on(length, other_length, group, tag=0, step=layout.cp * layout.tp)()
    received: Tensor = torch.empty(int(other_length), dtype=torch.uint8)
    collectives.pass_on(sent, received, group, tag=0, step=layout.cp * layout.tp)()
    found: list[ReadPacks] = pickle.loads(received.numpy().tobytes())  # noqa: S301 - by a rank of this gang
    return found


def _named(ranks: Sequence[int], marks_R: Sequence[Marks]) -> str:
    named = ", ".join(f"{rank} ({marks_R[rank].host})" for rank in ranks[:NAMED_MAX])
    more = f" and {len(ranks) - NAMED_MAX} more" if len(ranks) > NAMED_MAX else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {named}{more}"


def _close(one: Mark, other: Mark) -> bool:
    pairs = ((one.loss, other.loss), (one.dense, other.dense))
    return all(
        math.isclose(mine, theirs, rel_tol=SAME) or (math.isnan(mine) and math.isnan(theirs)) for mine, theirs in pairs
    )
