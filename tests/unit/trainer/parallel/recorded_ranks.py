"""Every rank of some layouts, one after another on a fake process group: prints its groups and its exchanges.

Run in a process of its own. Nothing arrives on a fake group, so the numbers are wrong; which exchanges a rank makes,
and in which order, follows from its code, its packs and autograd alone.
"""

from __future__ import annotations

import collections
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyreme_api.store import ObjectStore
from polyreme_planner.costs import Recompute
from polyreme_planner.layout import Layout
from polyreme_planner.schedules import Schedule
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.compute_options import ComputeOptions
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.communicators import Communicators
from polyreme_trainer.parallel.mesh import open_meshes
from polyreme_trainer.parallel.pipeline import NO_STAGES, PipelineSettings
from polyreme_trainer.parallel.world import RankSettings
from polyreme_trainer.train.microbatches import read_microbatches
from polyreme_trainer.train.settings import (
    CheckpointSettings,
    ImagesOver,
    OptimizerName,
    OptimizerSettings,
    ParameterSharding,
    TrainSettings,
)
from polyreme_trainer.train.state import backward, open_state, reduce, settle, update
from tests.parallel.pages import MEDIA, Pages
from tests.unit.trainer.host_waits import HostWaits

STEPS = 2
LAYERS = 4
ZERO1 = OptimizerSettings(zero1=True, bucket_scalars=20_000)
MUON = dataclasses.replace(ZERO1, name=OptimizerName.MUON)
ROWS: dict[str, Any] = {"parameter_sharding": ParameterSharding.FSDP2}
FULL: dict[str, Any] = {"compute_options": ComputeOptions(recompute=Recompute.FULL)}
SELECTIVE: dict[str, Any] = {"compute_options": ComputeOptions(recompute=Recompute.SELECTIVE)}


def pipeline(schedule: Schedule, *layers: int) -> PipelineSettings:
    return PipelineSettings(schedule=schedule, layers=layers, microbatches=2)


CASES: tuple[tuple[Layout, dict[str, Any]], ...] = (
    (Layout(dp=4), {}),
    (Layout(dp=2, ep=2), {"optimizer": ZERO1, **FULL}),
    (Layout(dp=4, ep=2), {"optimizer": ZERO1, **SELECTIVE}),
    (Layout(dp=4, ep=2), {"optimizer": MUON}),
    (Layout(dp=2, tp=2, ep=4), {"optimizer": ZERO1, "pipeline": PipelineSettings(microbatches=2)}),
    (Layout(dp=2, cp=2, ep=2), {"optimizer": MUON, "pipeline": PipelineSettings(microbatches=2)}),
    (Layout(cp=2, tp=2, ep=4), {}),
    (Layout(dp=2, cp=2, ulysses=2, ep=4), {"optimizer": ZERO1}),
    (Layout(dp=4, ep=2), {**ROWS, **FULL}),
    (Layout(dp=2, pp=2, ep=2), {"optimizer": ZERO1, "pipeline": pipeline(Schedule.ONE_F_ONE_B, 2, 2)}),
    (Layout(dp=2, pp=2), {"optimizer": ZERO1, "pipeline": pipeline(Schedule.INTERLEAVED, 1, 1, 1, 1)}),
    (Layout(dp=2, pp=2, ep=2), {"optimizer": ZERO1, "pipeline": pipeline(Schedule.ZBV, 1, 1, 1, 1)}),
)
"""Layouts of up to eight ranks, and how they train."""

Call = tuple[str, tuple[int, ...]]
"""Kind of exchange, and the name of its group with the group's ranks."""
NAMES = {"all_gather_into_tensor": "all_gather_single", "reduce_scatter_tensor": "reduce_scatter_single"}
WATCHED = (
    "all_reduce",
    "all_to_all_single",
    "all_gather_single",
    "all_gather_into_tensor",
    "reduce_scatter_single",
    "reduce_scatter_tensor",
    "broadcast",
    "batch_isend_irecv",
)


class Record:
    """The exchanges of one rank."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, str]] = []
        self.gradients = 0

    def watch(self) -> None:
        for name in WATCHED:
            vars(dist)[name] = self._watched(name, getattr(dist, name))

    def _watched(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*given: Any, **more: Any) -> Any:
            group = given[0][0].group if name == "batch_isend_irecv" else more.get("group")
            group = cast("dist.ProcessGroup", group or dist.group.WORLD)
            if dist.get_world_size(group) > 1:
                self.calls.append((NAMES.get(name, name), group.group_name))
            return real(*given, **more)

        return call

    def count(self) -> None:
        """Note how many gradients of one backward the parameter gets that gets most."""
        real = torch.autograd.backward

        def backward(roots: Any, *given: Any, **more: Any) -> None:
            self.gradients = max(self.gradients, most_gradients([roots] if isinstance(roots, Tensor) else roots))
            real(roots, *given, **more)

        vars(torch.autograd)["backward"] = backward


def most_gradients(roots: Sequence[Tensor]) -> int:
    """Count edges of a graph that lead to one parameter: its gradients are added before they reach the buffer."""
    nodes, uses = [root.grad_fn for root in roots], collections.Counter[Any]()
    seen = set(nodes)
    for node in nodes:
        following = [each for each, _ in node.next_functions if each is not None] if node is not None else []
        uses.update(each for each in following if type(each).__name__ == "AccumulateGrad")
        nodes += [each for each in following if each not in seen]
        seen.update(following)
    return max(uses.values(), default=0)


RECORD = Record()


def counts_that_were_sent(counts_E: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Stand in for the counts of others, which never arrive; the exchange is made all the same."""
    real_counts(counts_E, group)
    return counts_E.view(dist.get_world_size(group), -1).clone()


real_counts, real_recv = collectives.exchange_counts, dist.recv


def agreed(tensor: Tensor, **more: Any) -> None:
    """Stand in for what stages tell each other before their first step: that all know the sizes of their streams."""
    real_recv(tensor, **more)
    if not tensor.is_floating_point():
        tensor.fill_(1)


def recorded(layout: Layout, rank: int, **changes: Any) -> dict[str, Any]:
    """Open one rank and train two steps; only the first data-parallel rank's packs have images."""
    RECORD.calls, RECORD.gradients = [], 0
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=layout.world)
    decoder = dataclasses.replace(KIMI_VL_NANO.decoder, layers=LAYERS)
    given: dict[str, Any] = {"optimizer": OptimizerSettings(), "pipeline": NO_STAGES, **changes}
    settings = TrainSettings(
        rank=RankSettings(rank=rank, world=layout.world, attempt=1),
        layout=layout,
        shape=dataclasses.replace(
            KIMI_VL_NANO, decoder=decoder, vision=dataclasses.replace(KIMI_VL_NANO.vision, layers=1)
        ),
        steps=STEPS,
        checkpoint=CheckpointSettings(store=cast("ObjectStore", None)),
        images_over=ImagesOver.DATA,
        **given,
    )
    meshes = open_meshes(layout, Communicators(timeout_s=60))
    state = open_state(settings, meshes, media_token=MEDIA)
    opening, RECORD.calls = RECORD.calls, []
    source = Pages(packs=layout.dp * settings.pipeline.microbatches, seeing=1)

    def train(step: int) -> None:
        inputs = read_microbatches(state, source, settings, meshes, step)
        total = reduce(state, backward(state, *inputs), meshes)
        # Ranks without a loss of their own have counted nothing.
        update(state, dataclasses.replace(total, counted=1), settings.optimizer, rate=1e-3)

    train(1)
    first, watch = RECORD.calls, HostWaits()
    RECORD.calls = []
    with watch:
        train(2)  # the first one makes tables that are kept
    settle(state)
    dist.destroy_process_group()
    return {
        "groups": [(each.group.group_name, each.names, each.ranks) for each in meshes.communicators.opened],
        "opening": opening,
        "step": first,
        "waits": watch.waits,
        "gradients": RECORD.gradients,
    }


def main() -> None:
    """Print what each rank of each layout did, a line of JSON for each layout."""
    torch.set_num_threads(1)
    RECORD.watch()
    RECORD.count()
    collectives.exchange_counts = counts_that_were_sent
    vars(dist)["recv"] = agreed
    for layout, changes in CASES:
        ranks = [recorded(layout, rank, **changes) for rank in range(layout.world)]
        sys.stdout.write(json.dumps(ranks) + "\n")


if __name__ == "__main__":
    main()
