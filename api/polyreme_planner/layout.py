"""Parallel layouts that fit a world size, a model and a batch.

``world = pp x dp x cp x tp``. There are two meshes over the same ranks (parallel folding, arXiv:2504.14960): dense
``(pp, dp, cp, tp)`` for attention and dense layers, sparse ``(pp, edp, ep)`` for experts, with ``ep`` dividing ``dp x
cp x tp``. The last axis varies fastest, in both.
"""

from __future__ import annotations

import dataclasses
import itertools
import math

from polyreme_planner.shapes import ModelShape

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
        degrees = [(name, getattr(self, name)) for name in ("dp", "ep", "pp", "cp", "tp", "ulysses")]
        return " ".join(f"{name}{degree}" for name, degree in degrees if degree > 1 or name == "dp")


def misfits(
    layout: Layout, *, world: int, shape: ModelShape, packs_per_step: int, pack_tokens: int | None = None
) -> list[str]:
    """Return, in words, every rule that a layout breaks; empty if it fits.

    Args:
        layout: Degrees.
        world: Ranks.
        shape: Sizes of the model.
        packs_per_step: Packs that the data-parallel ranks share.
        pack_tokens: Tokens of a pack; None skips the rules of how packs are cut.
    """
    decoder = shape.decoder
    rules = [
        (decoder.experts % layout.ep == 0, f"ep {layout.ep} does not divide the model's {decoder.experts} experts"),
        (gives_each_packs(packs_per_step, layout.dp), _idle_words(packs_per_step, layout.dp)),
        *((count % layout.tp == 0, f"tp {layout.tp} does not divide {what} {count}") for what, count in _shared(shape)),
        (
            layout.cp % layout.ulysses == 0 and decoder.heads % (layout.tp * layout.ulysses) == 0,
            (
                f"ulysses {layout.ulysses} does not divide cp {layout.cp}, or tp x ulysses does not divide the "
                f"{decoder.heads} heads"
            ),
        ),
    ]
    if pack_tokens is not None:
        unit = cut_unit(layout)
        rules.append(
            (
                pack_tokens % unit == 0,
                f"sequenceTokens {pack_tokens} is not a multiple of {unit}, which cp and tp require",
            )
        )
    return [*mesh_misfits(layout, world=world), *(words for holds, words in rules if not holds)]


def packs_of_rank(packs_per_step: int, dp: int) -> int:
    """Return the packs that a data-parallel rank trains on in a step; null packs fill the last places (ADR 39)."""
    return -(-packs_per_step // dp)


def gives_each_packs(packs_per_step: int, dp: int) -> bool:
    """Whether every data-parallel rank has a pack that is not null; else fewer ranks would be as fast."""
    return packs_of_rank(packs_per_step, dp) * (dp - 1) < packs_per_step


def _idle_words(packs_per_step: int, dp: int) -> str:
    share = packs_of_rank(packs_per_step, dp)
    fewer = packs_of_rank(packs_per_step, share)
    each = f"{share} pack{'s' if share > 1 else ''} a rank"
    return f"packsPerStep {packs_per_step} leaves ranks of dp {dp} without a pack: {each}, as with dp {fewer}"


def _shared(shape: ModelShape) -> list[tuple[str, int]]:
    """Units that tensor-parallel ranks share, and their number."""
    vision, decoder = shape.vision, shape.decoder
    return [
        ("the decoder's heads", decoder.heads),
        ("the vocabulary", decoder.vocabulary),
        ("the dense feed-forward width", decoder.dense_ffn_width if decoder.dense_layers else 0),
        ("the shared experts' width", decoder.shared_experts * decoder.expert_ffn_width),
        ("the tower's heads", vision.heads),
        ("the tower's feed-forward width", vision.ffn_width),
        ("the projector's width", vision.width * vision.merge**2),
    ]


def cut_unit(layout: Layout) -> int:
    """A pack holds a multiple of this many tokens: a ring takes head and tail, and every part is split evenly."""
    pieces = 2 * layout.ring if layout.ring > 1 else 1
    return math.lcm(pieces, layout.cp * layout.tp)


def ulysses_degree(cp: int, heads: int) -> int:
    """Part of cp that exchanges heads for tokens by default, limited by the heads of a rank: it moves the least."""
    return math.gcd(cp, heads)


def mesh_misfits(layout: Layout, *, world: int) -> list[str]:
    """Return, in words, every rule of the two meshes that a layout breaks, whatever the model is."""
    dense = layout.dp * layout.cp * layout.tp
    rules = [
        (
            layout.world == world,
            f"dp {layout.dp} x pp {layout.pp} x cp {layout.cp} x tp {layout.tp} is {layout.world} ranks, not {world}",
        ),
        (dense % layout.ep == 0, f"ep {layout.ep} does not divide dp x cp x tp ({dense})"),
    ]
    return [words for holds, words in rules if not holds]


def plain_layouts(*, world: int, shape: ModelShape, packs_per_step: int) -> list[Layout]:
    """List every fitting layout that uses only dp and ep, by rising ep."""
    candidates = (Layout(dp=world, ep=ep) for ep in range(1, min(world, shape.decoder.experts) + 1))
    return [
        layout for layout in candidates if not misfits(layout, world=world, shape=shape, packs_per_step=packs_per_step)
    ]


def fitting_layouts(
    *, world: int, shape: ModelShape, packs_per_step: int, pack_tokens: int | None = None
) -> list[Layout]:
    """List every layout of one stage that fits: the plain ones first, then by rising cp x tp, then tp, then ep.

    Of a context-parallel group, as many ranks as the heads allow exchange heads (``ulysses_degree``).
    """
    found: list[Layout] = []
    for shards in divisors(world):
        for tp in divisors(shards):
            cp, heads = shards // tp, max(1, shape.decoder.heads // tp)
            layout = Layout(dp=world // shards, cp=cp, tp=tp, ulysses=ulysses_degree(cp, heads))
            folded = (dataclasses.replace(layout, ep=ep) for ep in divisors(world) if ep <= shape.decoder.experts)
            found += [
                choice
                for choice in folded
                if not misfits(choice, world=world, shape=shape, packs_per_step=packs_per_step, pack_tokens=pack_tokens)
            ]
    return found


def divisors(number: int, most: int | None = None) -> list[int]:
    """List the divisors of a number, rising, up to ``most``."""
    low = [divisor for divisor in range(1, math.isqrt(number) + 1) if number % divisor == 0]
    found = sorted({*low, *(number // divisor for divisor in low)})
    return found if most is None else [divisor for divisor in found if divisor <= most]


def fitting_worlds(*, near: int, step: int, shape: ModelShape, packs_per_step: int) -> list[int]:
    """List world sizes (multiples of ``step``) that some layout of dp and ep fits, nearest to ``near`` first."""
    limit = max(near * 2, step, packs_per_step)
    # A batch may have a million packs; of the worlds up to there, some two thousand give each rank some.
    sharing = [world for world in range(step, limit + 1, step) if gives_each_packs(packs_per_step, world)]
    nearest = sorted(sharing, key=lambda world: (abs(world - near), world))
    fitting = (world for world in nearest if plain_layouts(world=world, shape=shape, packs_per_step=packs_per_step))
    return list(itertools.islice(fitting, NEAREST_MAX))
