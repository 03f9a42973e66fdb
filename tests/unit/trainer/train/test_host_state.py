"""Updates of state in host memory are right in whatever order its copies and updates run, as far as they may differ."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from polyreme_trainer.parallel.flat_buffers import FlatModel, Storage, Update, flatten
from polyreme_trainer.train import muon
from polyreme_trainer.train.host_state import BUFFERS, Visits
from polyreme_trainer.train.optimizer import Optimizer, longest_visit
from polyreme_trainer.train.settings import OptimizerName, OptimizerSettings

SHAPES = {"a.weight": (12, 20), "b.weight": (20, 12), "c.weight": (16, 16), "norm.weight": (20,)}
ONE = {"a.weight": (12, 20)}
STEPS, SEEDS = 3, 12


class Device:
    """Queues that run at last, in an order drawn by chance, but for what they wait for."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._queues: list[LateQueue] = []
        self._reached: set[int] = set()
        self._marks = 0

    def queue(self) -> LateQueue:
        self._queues.append(LateQueue(self))
        return self._queues[-1]

    def mark(self) -> int:
        self._marks += 1
        return self._marks

    def run(self) -> None:
        while any(queue.work for queue in self._queues):
            ready = [queue for queue in self._queues if queue.work and self._may_run(*queue.work[0])]
            assert ready, "queues wait for each other"
            kind, of = self._chance.choice(ready).work.pop(0)
            if kind == "run":
                of()
            elif kind == "mark":
                self._reached.add(of)

    def _may_run(self, kind: str, of: Any) -> bool:
        return kind != "wait" or of in self._reached


class LateQueue:
    def __init__(self, device: Device) -> None:
        self._device = device
        self.work: list[tuple[str, Any]] = []

    def run(self, work: Callable[[], None]) -> None:
        self.work.append(("run", work))

    def mark(self) -> int:
        mark = self._device.mark()
        self.work.append(("mark", mark))
        return mark

    def wait(self, mark: int) -> None:
        self.work.append(("wait", mark))

    def uses(self, buffer: Tensor) -> None:
        """Python's counts keep what later work holds."""

    def settle(self) -> None:
        self._device.run()


Shapes = Mapping[str, tuple[int, ...]]


def held(settings: OptimizerSettings, shapes: Shapes = SHAPES) -> FlatModel:
    generator = torch.Generator().manual_seed(5)
    parameters = {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in shapes.items()}
    whole = muon.whole_names(shapes.items()) if settings.name is OptimizerName.MUON else frozenset[str]()
    flat = flatten(parameters, piggybacked=0, update=Update(storage=Storage(dtype=torch.bfloat16), whole=whole))
    flat.dense.gradients.copy_(torch.randn(flat.dense.length, generator=generator))
    return flat


def trained(settings: OptimizerSettings, device: Device | None, shapes: Shapes = SHAPES) -> list[Tensor]:
    """Take some steps, all of them before the device has run anything; return all state."""
    flat, visits = held(settings, shapes), None
    if device is not None:
        coming, updating, going = (device.queue() for _ in range(3))
        length = longest_visit(flat.parts, settings)
        visits = Visits(coming, updating, going, device=torch.device("cpu"), length=length)
    optimizer = Optimizer(flat, settings, visits=visits)
    for step in range(1, STEPS + 1):
        optimizer.step(learning_rate=0.01 * step, gradient_scale=0.5)
    optimizer.settle()
    moments = [buffer for state in optimizer.states for _, buffer, _ in state.buffers()]
    return [flat.dense.values, *([] if flat.dense.masters is None else [flat.dense.masters]), *moments]


@pytest.mark.parametrize("name", OptimizerName)
@pytest.mark.parametrize(("shapes", "bucket_scalars"), [(SHAPES, 96), (ONE, 1 << 20)], ids=["many", "one a step"])
def test_state_that_visits_the_device_is_updated_bit_by_bit(
    name: OptimizerName, shapes: Shapes, bucket_scalars: int
) -> None:
    """Many visits a step have to share the buffers; one alone comes again to the other buffer in the next step."""
    settings = OptimizerSettings(name=name, state_on_host=True, bucket_scalars=bucket_scalars)
    expected = trained(settings, None, shapes)
    for seed in range(SEEDS):
        seen = trained(settings, Device(seed), shapes)
        assert all(torch.equal(one, other) for one, other in zip(seen, expected, strict=True)), seed


def test_the_device_has_no_buffers_between_steps() -> None:
    """Activations of the next step are there then."""
    device = Device(0)
    queues = [device.queue() for _ in range(3)]
    visits = Visits(*queues, device=torch.device("cpu"), length=64)
    home = torch.zeros(64)
    visits.begin()
    buffers: list[weakref.ref[Tensor]] = []

    def update(visiting: Tensor) -> None:
        buffers.append(weakref.ref(visiting._base if visiting._base is not None else visiting))
        visiting.add_(1)

    visits.update([home], update)
    visits.end()
    visits.settle()
    del update
    gc.collect()
    assert home.sum() == 64
    assert [buffer() for buffer in buffers] == [None]


def test_visits_take_no_more_of_the_device_than_one_exchange() -> None:
    """Also on a rank that shares a buffer with no other, and has it as one piece."""
    settings = OptimizerSettings(state_on_host=True, bucket_scalars=96)
    assert BUFFERS * longest_visit(held(settings).parts, settings) == 3 * settings.bucket_scalars
