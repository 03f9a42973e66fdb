"""The models of the GPU suite: Kimi-VL-A3B at full width, cut in depth until it fits; nano in a rehearsal.

How deep is the planner's own arithmetic (``polyreme_planner.memory``): weights in bfloat16, gradients, originals and
moments in float32 (18 bytes a parameter), and what autograd keeps of the longest batch without recomputation.
"""

from __future__ import annotations

import dataclasses

from benchmarks.gpu.harness import Place

from polyreme_planner.costs import Recompute, Setting
from polyreme_planner.flops import Mix
from polyreme_planner.hardware import MIXED, Hardware
from polyreme_planner.layout import Layout
from polyreme_planner.memory import Memory, memory_of
from polyreme_planner.shapes import KIMI_VL_A3B, KIMI_VL_NANO, NO_VISION, ModelShape

KI = 1024
LONGEST = Mix(sequence_tokens=32 * KI, visual_share=0)


def cut(shape: ModelShape, layers: int, *, sees: bool = True, vocabulary: int | None = None) -> ModelShape:
    """Take the first layers of a model, all widths as they are."""
    decoder = dataclasses.replace(shape.decoder, layers=layers, vocabulary=vocabulary or shape.decoder.vocabulary)
    vision = shape.vision if sees else NO_VISION
    name = f"{shape.name}, {layers} layers{'' if sees else ', decoder alone'}"
    return dataclasses.replace(shape, name=name, decoder=decoder, vision=vision)


def base(place: Place) -> ModelShape:
    """The model whose widths are measured."""
    return KIMI_VL_NANO if place.rehearsal else KIMI_VL_A3B


def planned(shape: ModelShape, mix: Mix, hardware: Hardware, *, packs: int, recompute: Recompute) -> Memory:
    """Ask the planner what one device holds of the model at its fullest."""
    setting = Setting(shape=shape, mix=mix, hardware=hardware, numerics=MIXED)
    return memory_of(
        setting,
        Layout(),
        packs=packs,
        microbatches=1,
        recompute=recompute,
        schedule=None,
        split=(shape.decoder.layers,),
    )


def deepest(place: Place) -> int:
    """Layers of the deepest model that trains on 32K tokens with images' tower beside it, nothing recomputed."""
    if place.rehearsal:
        return KIMI_VL_NANO.decoder.layers
    fitting = [
        layers
        for layers in range(2, KIMI_VL_A3B.decoder.layers + 1)
        if planned(cut(KIMI_VL_A3B, layers), LONGEST, place.hardware, packs=1, recompute=Recompute.NONE).total_bytes
        <= place.hardware.usable_bytes
    ]
    return max(fitting, default=2)
