"""Bugs that are planted into a step of this process, so that the comparison with one process can be seen to notice."""

from __future__ import annotations

import dataclasses
import types
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from polyreme_trainer.model import moe
from polyreme_trainer.parallel import collectives, context, dispatch, fsdp, gradients, image_balancing, images, mesh
from polyreme_trainer.train import image_assignment
from polyreme_trainer.train import state as state_module


def plant(bug: str | None, world: Any) -> None:
    """Break this process."""
    _plant(bug, world)
    _plant_in_sharing(bug, world)
    _plant_in_dispatch(bug)
    _plant_in_rows(bug, world)
    _plant_in_deal(bug)


def _plant_in_deal(bug: str | None) -> None:
    """The same, in how images are balanced over data-parallel ranks and how their features return."""
    real_route, real_exchange = image_balancing.return_route, collectives.exchange_rows
    if bug == "features come home to other tokens":

        def return_route(*given: Any, **more: Any) -> Any:
            way = real_route(*given, **more)
            return dataclasses.replace(way, leaving=np.roll(way.leaving, 1))

        vars(image_assignment)["return_route"] = return_route
    if bug == "features come home without their gradients":
        collectives.exchange_rows = lambda rows_RD, **more: real_exchange(rows_RD, **more).detach()
    if bug == "gradients of remote images count twice":

        def twice(rows_RD: torch.Tensor, **more: Any) -> torch.Tensor:
            came = real_exchange(rows_RD, **more)
            return came + came - came.detach()

        collectives.exchange_rows = twice
    if bug == "grids of remote images are not in the order of their patches":
        encoded: Any = image_assignment.BalancedImages.encoded
        image_assignment.BalancedImages.encoded = property(lambda self: encoded.fget(self)[::-1])  # type: ignore[method-assign,assignment]
    if bug == "a rank skips the exchange" and dist.get_rank() == 1:
        collectives.exchange_rows = lambda rows_RD, *, received, **_: rows_RD.new_zeros(
            (sum(received), *rows_RD.shape[1:])
        )


def _plant_in_rows(bug: str | None, world: Any) -> None:
    """The same, in how rows of parameters are gathered and summed."""
    if bug == "rows are divided by their ranks":
        from torch.distributed.fsdp import FSDPModule

        FSDPModule.set_gradient_divide_factor = lambda self, factor: None  # type: ignore[method-assign]
    if bug == "rows of experts are not summed over their copies":
        real = collectives.reduce_into
        copies = dist.get_process_group_ranks(world.meshes.edp_group)

        def own_part(own: Any, whole: Any, group: Any, **options: Any) -> Any:
            if dist.get_process_group_ranks(group) != copies:
                return real(own, whole, group, **options)
            own.copy_(whole.chunk(dist.get_world_size(group))[dist.get_rank(group)])
            return None

        vars(collectives)["reduce_into"] = own_part
    if bug == "layers stay gathered":
        begin = fsdp._begin

        def begin_and_keep(stage: Any) -> None:
            begin(stage)
            stage.set_reshard_after_forward(False)

        vars(fsdp)["_begin"] = begin_and_keep


def _plant_in_dispatch(bug: str | None) -> None:
    """The same, in where rows go."""
    if bug == "a dropped row still has a gradient":
        # It takes that of the last place, where the zero after all places should be taken.
        vars(moe)["_pick"] = lambda rows_XD, index, *, padded: rows_XD.index_select(
            0, index.clamp(max=rows_XD.shape[0] - 1)
        )
    if bug == "an answer goes to the rank behind the one that asked":
        real = dispatch._swap
        vars(dispatch)["_swap"] = lambda rows_SD, outer, inner: real(rows_SD, outer, inner).roll(
            rows_SD.shape[0] // outer, 0
        )


def _plant(bug: str | None, world: Any) -> None:
    """Break the reduction, so that the comparison can be seen to notice."""
    if bug == "experts are not summed over their copies":
        real = collectives.sum_over
        collectives.sum_over = lambda buffer, group: None if group is world.meshes.edp_group else real(buffer, group)
    if bug == "an expert's gradient lies in the wrong slice":
        real_place = mesh.sparse_place
        wrong = lambda layout, rank: {**real_place(layout, rank), "ep": 1 - real_place(layout, rank)["ep"] * (rank < 2)}
        vars(state_module)["sparse_place"] = wrong
    if bug == "each rank divides by its own count":
        total = gradients.reduce_step
        vars(state_module)["reduce_step"] = lambda flat, local, meshes: dataclasses.replace(
            total(flat, local, meshes), counted=local.counted
        )
    if bug == "experts are divided by their copies":
        summed = collectives.sum_over

        def mean(buffer: torch.Tensor, group: Any) -> None:
            summed(buffer, group)
            if group is world.meshes.edp_group:
                buffer /= dist.get_world_size(group)

        collectives.sum_over = mean


def _plant_in_sharing(bug: str | None, world: Any) -> None:
    """The same, in how streams and layers are shared."""
    if bug == "whole parameters are not summed over context ranks":
        _sum_over_another_group(world, "stage_group", world.meshes.tp_group)
    if bug == "a norm's gradient is not summed over tensor ranks":
        _forget("input_layernorm", kept=world.meshes.place("tp") == 0)
    if bug == "slices are summed over tensor ranks":
        _sum_over_another_group(world, "replica_group", world.meshes.stage_group)
    if bug == "a stream is cut without head and tail":
        vars(context)["StreamCut"].tokens_of = lambda self, place: np.split(np.arange(self.tokens), self.ranks)[place]
    if bug == "gradients of keys stay where they were made":
        vars(collectives)["pass_on"] = _keep_gradients(collectives.pass_on)
    if bug == "features come in the order of their ranks":
        vars(images)["torch"] = types.SimpleNamespace(**{**vars(torch), "tensor": _unsorted})
    if bug == "what tensor ranks made is scattered without a sum":
        vars(collectives)["_reduce_scatter"] = _own_part


def _sum_over_another_group(world: Any, name: str, group: Any) -> None:
    real = gradients.reduce_step

    def wrong(flat: Any, local: Any, meshes: Any) -> Any:
        return real(flat, local, dataclasses.replace(meshes, **{name: group}))

    vars(state_module)["reduce_step"] = wrong


def _forget(part: str, *, kept: bool) -> None:
    """Let the gradients of parameters with this part in their name count on some ranks only."""
    real = gradients.reduce_step

    def wrong(flat: Any, local: Any, meshes: Any) -> Any:
        for name, gradient in flat.dense.views(flat.dense.gradients):
            gradient.mul_(kept or part not in name)
        return real(flat, local, meshes)

    vars(state_module)["reduce_step"] = wrong


def _keep_gradients(real: Any) -> Any:
    """Keys go round a ring; their gradients, which bear another tag, come back to the sender at once."""

    def pass_on(sent: torch.Tensor, received: torch.Tensor, group: Any, *, tag: int) -> Any:
        return real(sent, received, group, tag=tag) if tag == 0 else lambda: received.copy_(sent)

    return pass_on


def _unsorted(data: Any, *arguments: Any, **options: Any) -> torch.Tensor:
    return torch.tensor(np.arange(len(data)) if isinstance(data, np.ndarray) else data, *arguments, **options)


def _own_part(rows_TX: torch.Tensor, group: Any) -> torch.Tensor:
    """A reduce-scatter that forgets to reduce."""
    return rows_TX.chunk(dist.get_world_size(group))[dist.get_rank(group)].clone()
