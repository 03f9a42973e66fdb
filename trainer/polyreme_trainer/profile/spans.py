"""Time of each layer of a step, forward and backward: hooks on the layers and on the streams between them.

A layer's backward begins when the gradient of its output is there, and ends when the gradient of its input is. Each
span is named in the profiler's trace as well.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.profiler import record_function

from polyreme_trainer.model.stage import Stage


@dataclasses.dataclass(slots=True)
class Spent:
    """Time of one layer over all steps."""

    forward_s: float = 0.0
    backward_s: float = 0.0


class Spans:
    """Sums up the time of each layer.

    Args:
        now_s: Time. One that waits for the device tells how long layers take there, and slows the step.
    """

    def __init__(self, now_s: Callable[[], float]) -> None:
        self.now_s = now_s
        self.spent: dict[str, Spent] = collections.defaultdict(Spent)
        self._forward: list[tuple[str, float, Any]] = []
        self._backward: tuple[str, float, Any] | None = None

    def watch(self, name: str, module: nn.Module) -> None:
        """Time a module that takes a stream first and returns one first."""

        def before(_: nn.Module, given: tuple[Any, ...]) -> None:
            span = record_function(f"{name} forward")
            span.__enter__()
            self._forward.append((name, self.now_s(), span))
            if given and isinstance(given[0], Tensor) and given[0].requires_grad:
                given[0].register_hook(lambda _: self._end_of(name))

        def after(_: nn.Module, _given: tuple[Any, ...], gave: Any) -> None:
            begun, begun_s, span = self._forward.pop()
            span.__exit__(None, None, None)
            self.spent[begun].forward_s += self.now_s() - begun_s
            stream = gave[0] if isinstance(gave, tuple) else gave
            if isinstance(stream, Tensor) and stream.requires_grad:
                stream.register_hook(lambda _: self._begin(name))

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after)

    def end(self) -> None:
        """Close the backward that is open, if any: after the last layer nothing signals that it is done."""
        if self._backward is not None:
            name, begun_s, span = self._backward
            span.__exit__(None, None, None)
            self.spent[name].backward_s += self.now_s() - begun_s
            self._backward = None

    def _begin(self, name: str) -> None:
        self.end()
        span = record_function(f"{name} backward")
        span.__enter__()
        self._backward = (name, self.now_s(), span)

    def _end_of(self, name: str) -> None:
        if self._backward is not None and self._backward[0] == name:
            self.end()


def watched(stage: Stage) -> Iterator[tuple[str, nn.Module]]:
    """Name the layers of a stage."""
    model = stage.model
    if model.section.first and model.shape.sees:
        yield "tower", model.vision_tower
        yield "projector", model.multi_modal_projector
    for index in model.section.layers:
        kind = "moe layer" if index in stage.layers_with_experts else "dense layer"
        yield f"{kind} {index}", model.get_submodule(f"language_model.model.layers.{index}")


def steady(clock_s: Callable[[], float], device: str) -> Callable[[], float]:
    """Return a clock that waits for the device first."""
    if device == "cpu":
        return clock_s

    def now_s() -> float:
        torch.cuda.synchronize()
        return clock_s()

    return now_s
