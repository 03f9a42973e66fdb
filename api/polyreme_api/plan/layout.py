"""Which parallel layouts fit a world size, a model and a batch.

``world = pp x dp x cp x tp``. Two meshes stand over the same ranks (parallel folding, arXiv:2504.14960): dense
``(pp, dp, cp, tp)`` for attention and dense layers, sparse ``(pp, edp, ep)`` for experts, with ``ep`` dividing
``dp x cp x tp``. The last axis varies fastest, in both.
"""

from __future__ import annotations

import dataclasses

from polyreme_api.plan.shapes import ModelShape

NEAREST_MAX = 5
"""Suggestions in a refusal."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Layout:
    """Degrees of the five dimensions."""

    dp: int = 1
    ep: int = 1
    pp: int = 1
    cp: int = 1
    tp: int = 1
    ulysses: int = 1
    """Part of cp whose ranks exchange heads for tokens; the ranks of the rest pass keys and values around a ring."""

    @property
    def ring(self) -> int:
        """Places of the ring of a context-parallel group."""
        return self.cp // self.ulysses

    @property
    def world(self) -> int:
        """Ranks."""
        return self.pp * self.dp * self.cp * self.tp

    @property
    def edp(self) -> int:
        """Ranks that hold the same experts."""
        return self.dp * self.cp * self.tp // self.ep

    def __str__(self) -> str:
        """Name the degrees above 1, ``dp4 ep2``."""
        degrees = [(name, getattr(self, name)) for name in ("dp", "ep", "pp", "cp", "tp")]
        return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1 or name == "dp")


def misfits(layout: Layout, *, world: int, shape: ModelShape, packs_per_step: int) -> list[str]:
    """Say, in words, every rule that a layout breaks; empty when it fits."""
    decoder = shape.decoder
    rules = [
        (decoder.experts % layout.ep == 0, f"ep {layout.ep} does not divide the model's {decoder.experts} experts"),
        (packs_per_step % layout.dp == 0, f"packsPerStep {packs_per_step} is not divisible by dp {layout.dp}"),
    ]
    rules += [
        (getattr(layout, axis) == 1, f"{axis} {getattr(layout, axis)}: this version trains with dp and ep only")
        for axis in ("pp", "cp", "tp")
    ]
    return [*mesh_misfits(layout, world=world), *(words for holds, words in rules if not holds)]


def mesh_misfits(layout: Layout, *, world: int) -> list[str]:
    """Say, in words, every rule of the two meshes that a layout breaks, whatever the model is."""
    dense = layout.dp * layout.cp * layout.tp
    rules = [
        (
            layout.world == world,
            f"dp {layout.dp} x pp {layout.pp} x cp {layout.cp} x tp {layout.tp} is {layout.world} ranks, not {world}",
        ),
        (dense % layout.ep == 0, f"ep {layout.ep} does not divide dp x cp x tp ({dense})"),
    ]
    return [words for holds, words in rules if not holds]


def fitting_layouts(*, world: int, shape: ModelShape, packs_per_step: int) -> list[Layout]:
    """List every layout that fits, by rising ep."""
    candidates = (Layout(dp=world, ep=ep) for ep in range(1, min(world, shape.decoder.experts) + 1))
    return [
        layout for layout in candidates if not misfits(layout, world=world, shape=shape, packs_per_step=packs_per_step)
    ]


def fitting_worlds(*, near: int, step: int, shape: ModelShape, packs_per_step: int) -> list[int]:
    """List world sizes (multiples of ``step``) that some layout fits, nearest to ``near`` first."""
    limit = max(near * 2, step, packs_per_step)
    fitting = [
        world
        for world in range(step, limit + 1, step)
        if packs_per_step % world == 0  # cheap, and true of few: a batch may have a million packs
        and fitting_layouts(world=world, shape=shape, packs_per_step=packs_per_step)
    ]
    return sorted(fitting, key=lambda world: (abs(world - near), world))[:NEAREST_MAX]
