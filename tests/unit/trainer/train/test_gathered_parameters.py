"""Gathers of updated parameters overlap the forward pass: a module waits for what it reads, and for nothing else."""

from __future__ import annotations

import collections
import dataclasses
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from polyreme_planner.flops import Mix
from polyreme_planner.shapes import KIMI_VL_NANO
from polyreme_trainer.model.initialise import build_model
from polyreme_trainer.model.stage import Stage
from polyreme_trainer.parallel import collectives
from polyreme_trainer.parallel.flat_buffers import Update, flatten
from polyreme_trainer.parallel.flat_layout import Shares
from polyreme_trainer.parallel.zero1 import Zero1Update, open_zero1
from polyreme_trainer.profile.synthetic import MEDIA_TOKEN, synthetic_packs
from polyreme_trainer.train.inputs import to_inputs
from polyreme_trainer.train.optimizer import Optimizer
from polyreme_trainer.train.settings import OptimizerSettings

LAYERS = 4
SHAPE = dataclasses.replace(KIMI_VL_NANO, decoder=dataclasses.replace(KIMI_VL_NANO.decoder, layers=LAYERS))
MIX = Mix(sequence_tokens=48, image_patches=64, visual_share=0.4)


class Gathers:
    """Exchanges whose values are not there before they are waited for."""

    def __init__(self) -> None:
        self.begun: list[int] = []
        self.pending: set[int] = set()

    def begin(self, whole: Tensor, own: Tensor, _group: object) -> _Gather:
        self.begun.append(whole.data_ptr())
        return _Gather(self, whole, own)


class _Gather:
    def __init__(self, of: Gathers, whole: Tensor, own: Tensor) -> None:
        self._of, self._whole, self._came = of, whole, whole.clone()
        of.pending.add(whole.data_ptr())
        mine = own.clone()
        whole.fill_(torch.nan)
        own.copy_(mine)

    def wait(self) -> None:
        self._whole.copy_(self._came)
        self._of.pending.discard(self._whole.data_ptr())


@dataclasses.dataclass(frozen=True)
class Updated:
    stage: Stage
    update: Zero1Update
    gathers: Gathers


@pytest.fixture
def updated(monkeypatch: pytest.MonkeyPatch) -> Updated:
    """A model whose parameters were updated and are on their way."""
    gathers = Gathers()
    monkeypatch.setattr(collectives, "begin_gather", gathers.begin)
    monkeypatch.setattr(collectives, "begin_reduce_scatter", lambda *_: mock.Mock(spec=dist.Work))
    model = build_model(SHAPE, seed=3, media_token=MEDIA_TOKEN)
    drawn = dict(model.named_parameters())
    empty = {name: nn.Parameter(parameter.detach().to("meta")) for name, parameter in drawn.items()}
    update = Update(zero1=True, bucket_scalars=20_000)
    flat = flatten(empty, piggybacked=0, stage=Shares(count=2, place=1), update=update)
    for slot, parameter in flat.dense.parameters():
        flat.dense.put(slot, 0, drawn[slot.name].detach())
        module, _, name = slot.name.rpartition(".")
        model.get_submodule(module).register_parameter(name, parameter)
    zero1 = open_zero1(flat, collections.defaultdict[str, Any](lambda: None), [model], by_layer=True)
    Optimizer(flat, OptimizerSettings()).step(learning_rate=1e-3, gradient_scale=1.0, updated=zero1.gather)
    return Updated(Stage(model), zero1, gathers)


def loss_of(stage: Stage) -> float:
    batch = synthetic_packs(SHAPE, MIX, packs=2, seed=0)
    loss: Tensor = stage(microbatch=to_inputs(batch, device="cpu", media_token=MEDIA_TOKEN))
    return loss.item()


def test_no_module_reads_a_parameter_before_it_has_come(updated: Updated) -> None:
    seen = loss_of(updated.stage)
    assert not updated.gathers.pending
    updated.update.settle()
    assert seen == loss_of(updated.stage)  # that of what has come whole


def test_parameters_that_come_do_not_change_those_that_were_read(updated: Updated) -> None:
    """Autograd refuses a backward pass whose inputs have changed."""
    updated.update.begin(passes=1)
    batch = synthetic_packs(SHAPE, MIX, packs=2, seed=0)
    updated.stage(microbatch=to_inputs(batch, device="cpu", media_token=MEDIA_TOKEN)).backward()


def test_layers_run_while_later_ones_are_on_their_way(updated: Updated) -> None:
    pending: list[int] = []
    for layer in updated.stage.model.language_model.model.layers.values():
        layer.register_forward_pre_hook(lambda *_: pending.append(len(updated.gathers.pending)))
    begun = len(updated.gathers.begun)
    loss_of(updated.stage)
    assert len(pending) == LAYERS
    assert begun > pending[0] > pending[-1] > 0  # the head's are still to come
    assert pending == sorted(pending, reverse=True)


def test_gathers_begin_in_the_order_in_which_they_are_waited_for(updated: Updated) -> None:
    """A group makes its exchanges in the order in which they begin."""
    waited: list[int] = []
    real = _Gather.wait

    def wait(gather: _Gather) -> None:
        waited.append(gather._whole.data_ptr())
        real(gather)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_Gather, "wait", wait)
        loss_of(updated.stage)
    assert waited == updated.gathers.begun
