"""What a pipeline stage raises keeps its cause: torch wraps it in an error that says nothing of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining._backward import stage_backward, stage_backward_input
from torch.testing._internal.distributed.fake_pg import FakeStore

from polyreme_api.errors import FencedError
from polyreme_planner.schedules import Schedule
from polyreme_trainer.parallel.causes import CAUSES_MAX, causes
from polyreme_trainer.parallel.device import full_memory
from polyreme_trainer.parallel.pipeline import Scheduled
from polyreme_trainer.parallel.world import exchange_error

GLOO = "[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"
LOST: list[BaseException] = [RuntimeError(GLOO), dist.DistBackendError("NCCL error")]
FULL: list[BaseException] = [torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"), MemoryError()]
OTHER: list[BaseException] = [RuntimeError("shapes differ"), FencedError("a newer attempt"), OSError("no space")]


class Breaks(torch.autograd.Function):
    """Fails in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, error: BaseException) -> torch.Tensor:
        ctx.error = error
        return x * 1

    @staticmethod
    def backward(ctx: Any, *_: torch.Tensor) -> Any:
        raise ctx.error


def wrapped(error: BaseException) -> RuntimeError:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError) as raised:
        stage_backward((Breaks.apply(x, error),), (torch.ones(3),), (x,))
    return raised.value


@pytest.mark.parametrize("error", [*LOST, *FULL, *OTHER], ids=repr)
def test_a_lost_peer_and_full_memory_are_known_inside_what_torch_wraps_them_in(error: BaseException) -> None:
    for seen in (wrapped(error), wrapped(wrapped(error))):
        assert str(error) not in str(seen) or not str(error)
        assert (exchange_error(seen) is not None) == (error in LOST)
        assert (full_memory(seen) is not None) == (error in FULL)


def test_of_a_backward_for_inputs_alone_too() -> None:
    x = torch.ones(3, requires_grad=True)
    with pytest.raises(RuntimeError) as raised:
        stage_backward_input([Breaks.apply(x * 2, LOST[0])], [torch.ones(3)], [x], iter([]))
    assert exchange_error(raised.value) is not None


def test_causes_that_lead_back_to_the_first_end() -> None:
    first, second = RuntimeError("one"), RuntimeError("two")
    first.__cause__, second.__cause__ = second, first
    assert len(list(causes(first))) == CAUSES_MAX
    assert exchange_error(first) is None


@dataclasses.dataclass
class Tokens:
    """A microbatch; only its length is read."""

    tokens_T: torch.Tensor


class BrokenStage(torch.nn.Module):
    """A last stage that fails in one of its passes."""

    def __init__(self, error: BaseException, *, forward: bool) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(()))
        self._error, self._forward = error, forward

    def forward(self, *, microbatch: Tokens) -> torch.Tensor:
        if self._forward:
            raise self._error
        broken: torch.Tensor = Breaks.apply(self.weight * microbatch.tokens_T.shape[0], self._error)
        return broken


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.mark.parametrize("forward", [True, False], ids=["forward", "backward"])
@pytest.mark.parametrize("error", [*LOST, *FULL, *OTHER], ids=repr)
def test_a_pipeline_raises_what_its_stage_raised(alone: dist.ProcessGroup, error: Any, forward: bool) -> None:
    pipeline = Scheduled(
        {0: BrokenStage(error, forward=forward)},  # type: ignore[dict-item]
        Schedule.ONE_F_ONE_B,
        count=1,
        group=alone,
        device=torch.device("cpu"),
    )
    with pytest.raises(type(error)) as raised:
        pipeline.run([Tokens(torch.zeros(4)), Tokens(torch.zeros(4))])  # type: ignore[list-item]
    assert raised.value is error
    assert "ailed to run" in raised.value.__notes__[-1]
