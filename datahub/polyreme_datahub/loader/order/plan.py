"""The plan that the order of a run is made from, and its validation."""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np
import numpy.typing as npt

from polyreme_api.mixture import MixtureRecord
from polyreme_datahub.index.format import EVEN
from polyreme_planner.mixture import Segment


@dataclasses.dataclass(frozen=True, slots=True)
class BlockEnds:
    """The blocks of a source, as far as they are sealed."""

    ends: tuple[int, ...]
    """Samples up to the end of each sealed block."""
    total: int
    """Count of all blocks, in the end."""

    @property
    def complete(self) -> bool:
        """Whether all are sealed."""
        return len(self.ends) == self.total

    @property
    def sealed(self) -> int:
        """Samples of the sealed blocks."""
        return self.ends[-1] if self.ends else 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class OrderPlan:
    """Everything that the order depends on."""

    seed: int
    names: tuple[str, ...]
    """Names of the sources; part of each source's key."""
    lengths: tuple[npt.NDArray[np.int64], ...]
    """Tokens of each sample, by source."""
    segments: tuple[Segment, ...]
    packs_per_step: int
    pack_tokens: int
    blocks: tuple[BlockEnds | None, ...] = ()
    """Of each source; none: the first epoch is shuffled as a whole. Segments then have packs of one length."""
    epochs_max: tuple[int | None, ...] = ()
    """Most epochs of each source; None: no limit. Sources in blocks have none."""
    last_step: int | None = None
    """Where there are limits: the run's last step, with which the last window ends."""
    version: int = EVEN
    """How windows are cut (``index.format.ORDER``). A job keeps the one that it began with."""

    def blocks_of(self, source: int) -> BlockEnds | None:
        """Return the blocks of a source; None if it has none."""
        return self.blocks[source] if self.blocks else None

    def is_growing(self, source: int) -> bool:
        """Whether blocks of a source are still to be sealed."""
        blocks = self.blocks_of(source)
        return blocks is not None and not blocks.complete

    def segment_of(self, step: int) -> Segment:
        """Return the segment of a step."""
        return self.segments[bisect.bisect_right(self.segments, step, key=lambda of: of.first_step) - 1]

    def fitting_lengths(self, tokens_max: int) -> list[npt.NDArray[np.int64]]:
        """Return the tokens of the samples of each source that have at most so many."""
        return [lengths[lengths <= tokens_max] for lengths in self.lengths]

    def packs_in(self, segment: Segment) -> int:
        """Packs of each step of a segment."""
        return segment.packs_per_step or self.packs_per_step

    def sample_tokens_in(self, segment: Segment) -> int:
        """Tokens of the longest sample that a pack of a segment holds."""
        return self.tokens_in(segment) - segment.answer_room

    def tokens_in(self, segment: Segment) -> int:
        """Tokens of each pack of a segment."""
        return segment.pack_tokens or self.pack_tokens


@dataclasses.dataclass(frozen=True, slots=True)
class Identity:
    """Identity of a run's data and their order: a chain of digests whose later links alter no earlier step."""

    links: tuple[tuple[int, str], ...]
    """First step and digest of each link, by rising steps; the first begins at step 0."""
    mixture: MixtureRecord | None = None
    """What the links after the first were made of; None: all of the schedule is in the first."""

    def at(self, step: int) -> str:
        """Return the digest that holds at a step."""
        return self.links[bisect.bisect_right(self.links, step, key=lambda link: link[0]) - 1][1]


def used_up(plan: OrderPlan, step: int) -> str:
    """Say that no source has a turn left at a step."""
    limits = zip(plan.names, plan.segment_of(step).weights, plan.epochs_max, strict=True)
    given = ", ".join(f"{name} {most}" for name, weight, most in limits if weight)
    return (
        f"the data are used up at about step {step}: all sources with a weight have had their epochs ({given}); "
        "raise or drop an epochsMax, or train fewer steps"
    )


def unfilled_segments(plan: OrderPlan) -> list[int]:
    """Return the numbers of the segments that weigh a source without a sample that fits their packs.

    A source whose blocks are not all sealed may still get one.
    """
    least = [int(lengths.min()) if lengths.size else None for lengths in plan.lengths]

    def fits(source: int, tokens: int) -> bool:
        shortest = least[source]
        return plan.is_growing(source) or (shortest is not None and shortest <= tokens)

    return [
        number
        for number, segment in enumerate(plan.segments)
        if not all(fits(at, plan.sample_tokens_in(segment)) for at, weight in enumerate(segment.weights) if weight)
    ]
